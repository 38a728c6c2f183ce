"""What the demo model learns from: the corpus, and the ways to vary its questions into conversations.

The corpus is the text in scripts/demo_corpus/*.md. A topic starts with `## name`; its lines start with a mark:

    S: a subject | another name for it    (put into QUESTION_FORMS: "What is ...?", "Explain ...", and so on)
    Q: a question that is trained as it stands and in varied spelling
    T: a question that is never trained: the check at the end of training asks it
    A: the answer (may go on over several lines; a backslash and n stand for a line break)
    F: a follow-up question | another phrasing   (asked right after the topic's answer; its own A: follows)

Lines before the first `##` are for the reader only. The file system.md lists system prompts, one a line, as `P: text`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

CORPUS = Path(__file__).parent / "demo_corpus"
QUESTION_FORMS = [
    "What is {}?",
    "What are {}?",
    "Explain {}.",
    "Can you explain {}?",
    "Tell me about {}.",
    "What does {} mean?",
    "How does {} work?",
    "Describe {}.",
    "Define {}.",
    "I want to understand {}.",
    "What do you know about {}?",
    "What's {}?",
    "What is meant by {}?",
    "What is {} good for?",
    "What is the purpose of {}?",
    "Why is {} used?",
    "Why do we need {}?",
    "Could you say what {} is?",
    "Do you know what {} is?",
    "Give me a short explanation of {}.",
    "What can you tell me about {}?",
    "{} explained",
    "{}?",
    "{}",
]
REWORDINGS = {  # how a question begins -> other beginnings that keep its sense
    "How do I ": ["How can I ", "How to ", "How should I ", "I want to ", "What must I do to ", "how would one "],
    "How can I ": ["How do I ", "How to ", "How should one ", "What is the best way to "],
    "What is ": ["What's ", "what exactly is ", "Tell me what is ", "Explain "],
    "What does ": ["What exactly does ", "Explain what does ", "what would "],
    "Why is ": ["Tell me why is ", "For what reason is ", "why exactly is ", "How come "],
    "Why are ": ["Tell me why are ", "For what reason are "],
    "Why do ": ["For what reason do ", "How come ", "Why should "],
    "Why does ": ["For what reason does ", "Explain why ", "Why would "],
    "How does ": ["In what way does ", "How exactly does ", "Explain how does "],
    "How is ": ["In what way is ", "How exactly is ", "How can one see how is "],
    "Which ": ["What ", "Tell me which ", "Do you know which "],
    "Can I ": ["Is it possible to ", "May I ", "Could I "],
    "Write ": ["Please write ", "Could you write ", "Can you write "],
}
SMALL_WORDS = {"a", "an", "the", "is", "are", "do", "does", "of", "to", "in", "for", "i", "you", "me"}
ASKING_WORDS = {
    "what",
    "how",
    "which",
    "can",
    "please",
    "tell",
    "explain",
    "describe",
    "about",
    "know",
    "could",
    "give",
}
OPENINGS = [
    "Please: ",
    "Hi, ",
    "Hello! ",
    "Ok, ",
    "Quick question: ",
    "Can you tell me: ",
    "I have a question. ",
    "So ",
]
ENDINGS = [" Thanks.", " please", " Explain briefly.", " Keep it short.", " (short answer)"]


@dataclass
class Topic:
    """One question of the corpus in all its phrasings, the answer, and what may be asked after it."""

    name: str
    subjects: list[str] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    answer: str = ""
    follow_ups: list[tuple[list[str], str]] = field(default_factory=list)  # (phrasings, answer)

    def trained_questions(self) -> list[str]:
        """Every phrasing that training shows unchanged."""
        return self.questions + [form.format(subject) for subject in self.subjects for form in QUESTION_FORMS]


def read_corpus(folder: Path = CORPUS) -> tuple[list[Topic], list[str]]:
    """The topics and the system prompts of all .md files in `folder`; ValueError names a line that does not fit."""
    topics: list[Topic] = []
    prompts: list[str] = []
    for path in sorted(folder.glob("*.md")):
        for mark, text in marked_lines(path):
            if mark == "##":
                topics.append(Topic(text))
            elif mark == "P":
                prompts.append(text)
            else:
                add_line(topics[-1], mark, text)
    for topic in topics:
        if not (topic.answer and topic.trained_questions() and topic.held_out and all(a for _, a in topic.follow_ups)):
            raise ValueError(f"topic {topic.name!r} lacks an answer, a trained question or a held-out question")
    return topics, prompts


def marked_lines(path: Path) -> list[tuple[str, str]]:
    """(mark, text) of each marked line of a corpus file; a line without a mark continues the one before it."""
    found: list[tuple[str, str]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        mark, _, text = line.partition(" ")
        if mark in ("##", "S:", "Q:", "T:", "A:", "F:", "P:"):
            found.append((mark.rstrip(":"), text.strip()))
        elif line.strip() and found:
            if found[-1][0] != "A":
                raise ValueError(f"{path.name}:{number}: only an answer may go on over several lines: {line!r}")
            found[-1] = ("A", f"{found[-1][1]} {line.strip()}")
    return [(mark, text.replace("\\n", "\n")) for mark, text in found]


def add_line(topic: Topic, mark: str, text: str) -> None:
    """Put one marked line where it belongs in its topic."""
    if mark == "S":
        topic.subjects += [part.strip() for part in text.split("|")]
    elif mark == "Q":
        topic.questions.append(text)
    elif mark == "T":
        topic.held_out.append(text)
    elif mark == "F":
        topic.follow_ups.append(([part.strip() for part in text.split("|")], ""))
    elif topic.follow_ups:
        topic.follow_ups[-1] = (topic.follow_ups[-1][0], text)
    else:
        topic.answer = text


def vary(question: str, rng: random.Random) -> str:
    """The question as another person might type it: case, punctuation, an opening, a typo, a missing word."""
    if rng.random() < 0.3:
        question = reword(question, rng)
    if rng.random() < 0.12:
        question = key_words_only(question)
    elif rng.random() < 0.15:
        question = drop_small_word(question, rng)
    if rng.random() < 0.12:
        question = misspell(question, rng)
    if rng.random() < 0.15:
        question = question.rstrip("?.!")
    elif rng.random() < 0.08:
        question = question.rstrip("?.") + rng.choice(["?", ".", "!", "??", " ?"])
    if rng.random() < 0.12:
        question += rng.choice(ENDINGS)
    if rng.random() < 0.15:
        question = rng.choice(OPENINGS) + question[:1].lower() + question[1:]
    case = rng.random()
    return question.lower() if case < 0.25 else question[:1].upper() + question[1:] if case < 0.5 else question


def reword(question: str, rng: random.Random) -> str:
    """The question with another beginning, where REWORDINGS has one."""
    for start, others in REWORDINGS.items():
        if question.startswith(start):
            return rng.choice(others) + question[len(start) :]
    return question


def drop_small_word(question: str, rng: random.Random) -> str:
    """The question without one of its SMALL_WORDS: the sense stays."""
    words = question.split(" ")
    spots = [i for i, word in enumerate(words) if word.lower() in SMALL_WORDS]
    if spots and len(words) > 3:
        del words[rng.choice(spots)]
    return " ".join(words)


def key_words_only(question: str) -> str:
    """The question as one types it into a search box: without its SMALL_WORDS and the words that ask."""
    kept = [word for word in question.split(" ") if word.lower().rstrip("?.!") not in SMALL_WORDS | ASKING_WORDS]
    return " ".join(kept) if len(kept) > 1 else question


def misspell(text: str, rng: random.Random) -> str:
    """`text` with two neighbouring letters of a long word swapped, or one letter missing."""
    words = text.split(" ")
    spots = [i for i, word in enumerate(words) if len(word) > 5 and word.isalpha()]
    if spots:
        i = rng.choice(spots)
        at = rng.randrange(1, len(words[i]) - 2)
        first, second = words[i][at : at + 2]
        words[i] = words[i][:at] + rng.choice([second + first, first]) + words[i][at + 2 :]
    return " ".join(words)


def make_conversation(topics: list[Topic], prompts: list[str], rng: random.Random) -> list[dict[str, str]]:
    """A conversation about random topics: mostly one question, sometimes many, with or without a system prompt."""
    messages: list[dict[str, str]] = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": rng.choice(prompts)})
    for _ in range(rng.choices([1, 2, 3, 4, 8], weights=[55, 22, 13, 7, 3])[0]):
        topic = rng.choice(topics)
        messages += dialogue(vary(rng.choice(pick_phrasings(topic, rng)), rng), topic.answer)
        for phrasings, answer in topic.follow_ups:
            if rng.random() < 0.5:
                messages += dialogue(vary(rng.choice(phrasings), rng), answer)
    return messages


def pick_phrasings(topic: Topic, rng: random.Random) -> list[str]:
    """Its own questions or the ready-made forms, with equal chance where it has both: the forms are many more."""
    forms = [form.format(subject) for subject in topic.subjects for form in QUESTION_FORMS]
    return forms if forms and (not topic.questions or rng.random() < 0.5) else topic.questions


def dialogue(question: str, answer: str) -> list[dict[str, str]]:
    """One question and its answer as messages."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
