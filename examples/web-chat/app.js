// The page: a question goes out, the answer is shown at the reader's pace. See answer.js for the client's use.
import { Answer } from "./answer.js";
import { modelNames } from "./gateway.js";
import { showReading } from "./reading.js";

const find = (id) => document.getElementById(id);
const log = find("log");
const baseUrl = find("base-url");
const rate = find("rate");
const pause = find("pause");
const question = find("question");
const messages = [];
let answer;

baseUrl.value = localStorage.getItem("tokenflow-base-url") ?? "http://127.0.0.1:8080/v1";
rate.value = localStorage.getItem("tokenflow-rate") ?? rate.value;

/** A name for who reads in this browser. It says nothing else about him. */
function readerName() {
  let name = localStorage.getItem("tokenflow-reader");
  if (name === null) {
    const bytes = crypto.getRandomValues(new Uint8Array(12));
    name = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
    localStorage.setItem("tokenflow-reader", name);
  }
  return name;
}

/** Where to ask, as the fields say now. */
function connection() {
  return {
    baseUrl: baseUrl.value.trim().replace(/\/+$/, ""),
    apiKey: find("api-key").value.trim(),
    model: find("model").value.trim(),
  };
}

function addMessage(role, text) {
  const message = document.createElement("article");
  message.className = role;
  message.textContent = text;
  find("welcome")?.remove();
  log.append(message);
  log.scrollTop = log.scrollHeight;
  return message;
}

/** Runs what moves the text; the end stays in view if it was. */
function keepEnd(change) {
  const atEnd = log.scrollHeight - log.clientHeight - log.scrollTop < 48;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

async function ask(text) {
  const where = connection();
  messages.push({ role: "user", content: text });
  addMessage("user", text);
  const shown = addMessage("assistant", "");
  answer = new Answer({
    where,
    user: readerName(),
    rate: Number(rate.value),
    log,
    show: (part) => keepEnd(() => shown.append(part)),
    onChange: update,
  });
  update();
  try {
    await answer.read([...messages]);
  } catch (error) {
    const failure = addMessage("error", explain(error, where, shown.textContent !== ""));
    failure.setAttribute("role", "alert");
  }
  messages.push({ role: "assistant", content: shown.textContent });
  if (shown.textContent === "") shown.remove();
  update();
}

function explain(error, { baseUrl }, begun) {
  if (!(error instanceof TypeError)) return error.message; // fetch throws TypeErrors for what the network did
  if (begun) return `The connection to ${baseUrl} broke off.`;
  return `${baseUrl} cannot be reached: is it running, and does it allow pages of ${location.origin}?`;
}

function update() {
  const busy = answer !== undefined && !answer.over;
  find("send").hidden = busy;
  find("stop").hidden = !busy;
  pause.disabled = !busy;
  pause.textContent = answer?.pausedByButton && busy ? "Resume" : "Pause";
  showReading(answer);
}

function showSettings() {
  find("rate-text").textContent = `${Number(rate.value).toFixed(1)} tokens/s`;
  find("where").textContent = baseUrl.value.replace(/^https?:\/\//, "") || "no base URL";
}

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = question.value.trim();
  if (text === "" || (answer && !answer.over)) return;
  if (!find("settings").reportValidity()) return void (find("connection").open = true);
  question.value = "";
  find("connection").open = false;
  void ask(text);
});
question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  find("ask").requestSubmit();
});
find("settings").addEventListener("submit", (event) => event.preventDefault());
find("stop").addEventListener("click", () => answer?.stop());
pause.addEventListener("click", () => answer?.togglePause());
rate.addEventListener("input", () => {
  localStorage.setItem("tokenflow-rate", rate.value);
  answer?.setRate(Number(rate.value));
  showSettings();
});
baseUrl.addEventListener("change", () => {
  localStorage.setItem("tokenflow-base-url", baseUrl.value);
  showSettings();
});
find("model").addEventListener("focus", async () => {
  const names = await modelNames(connection()).catch(() => []); // the field can be filled by hand
  find("models").replaceChildren(...names.map((name) => new Option(name)));
});
document.addEventListener("visibilitychange", update);

showSettings();
update();
