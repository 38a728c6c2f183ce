// Puts the page together: views, theme, API key, keyboard.

import { apiKey, setApiKey } from "./api.js";
import { answerAgain, listModels, newChat, openHistory, startChat, stopAnswer } from "./chat.js";
import { $ } from "./dom.js";
import { goLive, pauseOrPlay, redrawEngine, startEngine, stepBack, stepForward, watch } from "./engine.js";
import { showSettings } from "./settings.js";

const THEME = "cupyllm.theme";
const narrow = matchMedia("(max-width: 1000px)");
const dark = matchMedia("(prefers-color-scheme: dark)");
const shown = { chat: true, engine: true };

// Views: side by side, or one at a time where there is no room.

function showView(name) {
  if (narrow.matches) Object.assign(shown, { chat: name === "chat", engine: name === "engine" });
  else {
    shown[name] = !shown[name];
    if (!shown.chat && !shown.engine) shown[name === "chat" ? "engine" : "chat"] = true;
  }
  applyViews();
}

function applyViews() {
  for (const [name, on] of Object.entries(shown)) {
    $(name).hidden = !on;
    $(`show-${name}`).setAttribute("aria-pressed", String(on));
  }
  document.body.classList.toggle("both", shown.chat && shown.engine);
  watchIfSeen();
  redrawEngine();
}

function fitViews() {
  Object.assign(shown, { chat: true, engine: !narrow.matches });
  applyViews();
}

// Where one view is shown at a time, the engine is watched behind the chat too, to be looked at afterwards.
const watchIfSeen = () => watch((shown.engine || narrow.matches) && !document.hidden);

// Theme: the system's, until one is chosen.

function applyTheme(theme) {
  document.documentElement.dataset.theme = theme ?? (dark.matches ? "dark" : "light");
  $("theme").textContent = document.documentElement.dataset.theme === "dark" ? "Light" : "Dark";
  redrawEngine();
}

function changeTheme() {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem(THEME, theme);
  applyTheme(theme);
}

// API key: asked for when the server asks.

async function connect() {
  try {
    await listModels();
  } catch (error) {
    if (error.status === 401) {
      openKey(apiKey() ? error.message : "");
      return;
    }
    $("announce").textContent = error.message;
    setTimeout(connect, 3000);
    return;
  }
  watchIfSeen();
}

function openKey(refusal) {
  $("key").value = apiKey();
  $("key-refusal").textContent = refusal;
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

function onKey(event) {
  const writing = event.target.closest("input, textarea, select");
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) stopAnswer();
  else if (event.altKey && !event.ctrlKey && !event.metaKey) {
    const action = { KeyN: newChat, KeyR: answerAgain, KeyH: openHistory, KeyE: () => showView("engine") }[event.code];
    if (!action) return;
    event.preventDefault();
    action();
  } else if (!writing && !event.ctrlKey && !event.metaKey && !document.querySelector("dialog[open]")) {
    const action = { "/": () => $("prompt").focus(), "?": () => $("help-dialog").showModal(), p: pauseOrPlay, l: goLive,
      ArrowLeft: stepBack, ArrowRight: stepForward }[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }
}

applyTheme(localStorage.getItem(THEME));
startEngine();
showSettings();
startChat();
fitViews();
connect();
$("show-chat").addEventListener("click", () => showView("chat"));
$("show-engine").addEventListener("click", () => showView("engine"));
$("theme").addEventListener("click", changeTheme);
$("open-key").addEventListener("click", () => openKey(""));
$("open-help").addEventListener("click", () => $("help-dialog").showModal());
$("close-help").addEventListener("click", () => $("help-dialog").close());
$("key-dialog").addEventListener("close", () => {
  if ($("key-dialog").returnValue !== "save") return;
  setApiKey($("key").value);
  connect();
});
narrow.addEventListener("change", fitViews);
dark.addEventListener("change", () => applyTheme(localStorage.getItem(THEME)));
document.addEventListener("visibilitychange", watchIfSeen);
document.addEventListener("keydown", onKey);
$("prompt").focus();
