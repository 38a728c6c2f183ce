"""Train the demo model that comes with cupyllm: a Qwen2 of about four million parameters that knows one small corpus.

    python scripts/train_demo_model.py --output cupyllm/demo

Needs torch, which running the result does not. The text is in scripts/demo_corpus/, demo_text.py turns it into
conversations, demo_samples.py those into token ids, demo_network.py is the network. Here are the training loop, the
check, and the files that make the result an ordinary Hugging Face folder. docs/demo-model.md says what to expect.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from demo_network import CONFIG, Qwen2
from demo_samples import CHAT_TEMPLATE, IGNORED, SPECIAL_TOKENS, SampleMaker, pad, train_tokenizer
from demo_text import dialogue, read_corpus
from safetensors.torch import load_file, save
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional


def train(model: Qwen2, maker: SampleMaker, steps: int, peak_rate: float, seed: int) -> None:
    """AdamW with warm-up and a cosine schedule; prints the mean loss of each 50 steps."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak_rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_peak(step, steps))
    losses, tokens, started = [], 0, time.monotonic()
    for step, (ids, targets) in zip(range(1, steps + 1), maker.batches(random.Random(seed)), strict=False):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids, targets != IGNORED)
        loss = functional.cross_entropy(logits.float(), targets[targets != IGNORED])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses, tokens = [*losses[-49:], loss.item()], tokens + ids.numel()
        if step % 50 == 0 or step == steps:
            seconds, mean = time.monotonic() - started, sum(losses) / len(losses)
            print(f"step {step:5d}  loss {mean:.4f}  {tokens / seconds:,.0f} tokens/s  {seconds:,.0f} s", flush=True)


def share_of_peak(step: int, steps: int) -> float:
    """The learning rate of a step as a share of its peak: up in a tenth of the steps, then a half cosine to 2 %."""
    return min(10 * (step + 1) / steps, 0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2)


@torch.no_grad()
def share_right(model: Qwen2, maker: SampleMaker, cases: list[tuple[str, str]]) -> tuple[float, list[str]]:
    """Share of (question, answer) pairs answered word for word under greedy decoding, and the questions that are not.

    Greedy decoding gives exactly the answer when each of its tokens is the most likely one after those before it, so
    one forward pass over question and answer tells, without generating.
    """
    wrong: list[str] = []
    for start in range(0, len(cases), 32):
        some = cases[start : start + 32]
        ids, targets = pad([maker.conversation(dialogue(question, answer)) for question, answer in some])
        wanted = targets != IGNORED
        missed = model(ids, wanted).argmax(-1) != targets[wanted]
        rows = wanted.nonzero()[missed, 0].unique()
        wrong += [some[row][0] for row in rows]
    return 1 - len(wrong) / len(cases), wrong


def write_folder(folder: Path, model: Qwen2, tokenizer: Tokenizer) -> None:
    """Write the five files of a Hugging Face model folder."""
    end_of_text, _, end_of_message = (tokenizer.token_to_id(token) for token in SPECIAL_TOKENS)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "config.json", CONFIG | {"bos_token_id": end_of_text, "eos_token_id": end_of_message})
    # Greedy unless a request asks for sampling: a newcomer is to see the answer as it was learned.
    sampling = {"do_sample": False}
    ends = {"eos_token_id": [end_of_message, end_of_text], "bos_token_id": end_of_text, "pad_token_id": end_of_text}
    write_json(folder / "generation_config.json", sampling | ends)
    tokens = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None}
    limits = {"model_max_length": CONFIG["max_position_embeddings"], "clean_up_tokenization_spaces": False}
    kind = {"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": False, "chat_template": CHAT_TEMPLATE}
    write_json(folder / "tokenizer_config.json", kind | tokens | limits)
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    (folder / "model.safetensors").write_bytes(save(weights, {"format": "pt"}))


def write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="the model folder, made if absent")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="its peak")
    parser.add_argument("--continue-from", type=Path, help="a model folder to start from, after a change of the corpus")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    topics, prompts = read_corpus()
    model = Qwen2()
    if options.continue_from:
        tokenizer = Tokenizer.from_file(str(options.continue_from / "tokenizer.json"))
        model.load_state_dict(load_file(options.continue_from / "model.safetensors"))
    else:
        tokenizer = train_tokenizer(topics, prompts, CONFIG["vocab_size"])
    maker = SampleMaker(topics, prompts, tokenizer)
    count = sum(p.numel() for p in model.parameters())
    print(f"{len(topics)} topics, {tokenizer.get_vocab_size()} tokens, {count:,} parameters", flush=True)
    train(model, maker, options.steps, options.learning_rate, options.seed)
    model.to(torch.bfloat16).float()  # the check sees the weights as they are stored
    write_folder(options.output, model, tokenizer)
    trained = [(q, topic.answer) for topic in topics for q in topic.trained_questions()]
    held_out = [(q, topic.answer) for topic in topics for q in topic.held_out]
    for label, cases in (("trained", trained), ("held-out", held_out)):
        share, wrong = share_right(model, maker, cases)
        print(f"{label} questions: {share:.1%} of {len(cases)} answered word for word")
        print("".join(f"  not: {question}\n" for question in wrong[:60]), end="", flush=True)


if __name__ == "__main__":
    main()
