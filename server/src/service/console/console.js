// Replaces the parts of the page that changed, as the node tells.
"use strict";

const state = document.getElementById("live");
const tell = (text, kind) => {
  state.textContent = text;
  state.className = kind;
};

// The text that the reader has selected stays as it is.
const isSelected = (part) => {
  const selection = document.getSelection();
  return selection && !selection.isCollapsed && selection.containsNode(part, true);
};

const waiting = new Map();

const show = (id, html) => {
  const part = document.getElementById(id);
  if (!part) return;
  if (isSelected(part)) {
    waiting.set(id, html);
    return;
  }
  waiting.delete(id);
  const scrolled = [...part.querySelectorAll(".wide")].map((wide) => wide.scrollLeft);
  // The node has escaped everything in it, and the policy of the page allows no scripts within it.
  part.innerHTML = html;
  part.querySelectorAll(".wide").forEach((wide, at) => {
    if (scrolled[at]) wide.scrollLeft = scrolled[at];
  });
};

let source = null;
let heard = 0;
let retry = null;

const stop = () => {
  if (source) source.close();
  source = null;
  clearTimeout(retry);
};

const start = () => {
  stop();
  source = new EventSource("/console/events");
  source.onmessage = (event) => {
    heard = Date.now();
    tell("live", "good");
    const late = [...waiting];
    for (const [id, html] of Object.entries(JSON.parse(event.data))) show(id, html);
    for (const [id, html] of late) if (waiting.get(id) === html) show(id, html);
  };
  source.onerror = () => {
    const refused = source.readyState === EventSource.CLOSED;
    tell(refused ? "the node refuses events; trying again" : "no connection; trying again", "bad");
    if (refused) {
      stop();
      retry = setTimeout(start, 5000);
    }
  };
};

// A page that nobody sees costs nothing.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) stop();
  else start();
});

setInterval(() => {
  const seconds = Math.round((Date.now() - heard) / 1000);
  if (source && heard && seconds > 5) tell(`nothing heard for ${seconds} s`, "bad");
}, 1000);

if (!document.hidden) start();
