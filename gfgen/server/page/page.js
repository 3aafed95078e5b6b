// The page at /: connects the parts, and shows the header, the connection and the key dialog.

import { Acts } from "./acts.js";
import { Colours } from "./colours.js";
import { Form } from "./form.js";
import { Gallery } from "./gallery.js";
import { ask, Live } from "./live.js";
import { Notices } from "./notices.js";
import { Queue } from "./queue.js";
import { Timeline } from "./timeline.js";
import { byId, counted, make, mark, say, write } from "./words.js";

/** The highlighted job: `kept` after a click, `touched` while the pointer is over it. */
class Picked extends EventTarget {
  kept = null;
  #touched = null;

  get job() {
    return this.#touched ?? this.kept;
  }

  keep(id) {
    this.kept = id;
    this.dispatchEvent(new Event("change"));
  }

  touch(id) {
    this.#touched = id;
    this.dispatchEvent(new Event("change"));
  }

  /** For a removed row, which sends no pointerleave event. */
  leave(id) {
    if (this.#touched === id) this.touch(null);
  }
}

const live = new Live();
const colours = new Colours();
const picked = new Picked();
const form = new Form({ live });
const parts = [
  new Timeline({ live, colours, picked }),
  new Queue({ live, colours, picked }),
  new Gallery({ live, acts: new Acts({ live, form, picture: form.picture }) }),
  new Notices({ live }),
  form,
];

function show() {
  if (!live.state) return;
  for (const part of parts) part.show();
  showHead();
}

function showHead() {
  const { state, connection } = live;
  const kind = connection.kind === "live" ? state?.status ?? "connecting" : connection.kind;
  const text = { lost: "connection lost", locked: "locked" }[kind] ?? kind;
  write(byId("status"), text);
  mark(byId("status"), "data-kind", kind);
  mark(byId("status"), "title", state?.reason ?? null);
  mark(document.body, "data-kind", kind);
  if (!state) return;
  const up = state.ranks.filter((rank) => rank.status === "idle" || rank.status === "busy");
  const use = up.reduce((sum, rank) => sum + rank.utilisation, 0) / Math.max(1, up.length);
  const ranks = `${up.length} of ${counted(state.ranks.length, "rank")} up, ${Math.round(100 * use)}% busy`;
  const shown = state.ranks.length ? [state.device, ranks] : [state.reason];
  write(byId("summary"), shown.filter(Boolean).join(" \u00b7 "));
  document.title = `${state.num_open ? `(${state.num_open}) ` : ""}gfgen`;
  showPolicy(state.policy);
}

// The policy -----------------------------------------------------------------------------------------

function showPolicy({ policy, deciding, reason, available }) {
  const select = byId("policy");
  const names = available.includes(policy) ? available : [policy, ...available];
  if ([...select.options].map((option) => option.value).join() !== names.join()) {
    select.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
  }
  if (document.activeElement !== select) select.value = policy;
  select.disabled = live.state.status !== "ready";
  write(byId("deciding"), deciding && deciding !== policy ? `${deciding} decides` : "");
  mark(byId("deciding"), "title", reason);
}

byId("policy").addEventListener("change", async (event) => {
  const select = event.target;
  const policy = select.value; // the next state may set it back before the answer is there
  try {
    await ask("POST", "/v1/policy", { json: { policy } });
    say(`The policy is ${policy}`);
  } catch (problem) {
    select.value = live.state.policy.policy;
    warn(`The policy did not change: ${problem.message}`);
  }
});

// The connection -------------------------------------------------------------------------------------

live.addEventListener("connection", () => {
  const { kind, reason, when } = live.connection;
  const wasLost = !byId("lost").hidden;
  if (kind === "lost") {
    const hasStopped = live.state?.status === "draining";
    const what = hasStopped ? "The server stopped. Open jobs continue after a restart." : "Connection lost.";
    write(byId("lost-text"), `${what} ${reason}`);
    write(byId("lost-when"), when);
    byId("lost-retry").hidden = false;
  } else if (wasLost && kind === "live") say("Reconnected");
  byId("lost").hidden = kind !== "lost";
  if (kind === "locked") askForKey();
  showHead();
});

/** Show an error that belongs to no field. */
function warn(text) {
  write(byId("lost-text"), text);
  write(byId("lost-when"), "");
  byId("lost-retry").hidden = true;
  byId("lost").hidden = false;
  setTimeout(() => (byId("lost").hidden = live.connection.kind !== "lost"), 8000);
}

byId("lost-retry").addEventListener("click", () => live.retry());
addEventListener("online", () => live.retry());

// The key --------------------------------------------------------------------------------------------

function askForKey() {
  byId("key-dialog").returnValue = "";
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

byId("key-dialog").addEventListener("close", () => {
  if (byId("key-dialog").returnValue !== "open") askForKey(); // the page is empty without the key
});
byId("key-dialog-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  write(byId("key-dialog-wrong"), "");
  try {
    await ask("POST", "/v1/session", { json: { api_key: byId("api-key").value } });
  } catch (problem) {
    write(byId("key-dialog-wrong"), problem.status === 401 ? "Wrong key." : problem.message);
    byId("api-key").select();
    return;
  }
  byId("api-key").value = "";
  byId("key-dialog").close("open");
  live.retry();
});

// A phone shows the results first, in the order in which the keyboard reaches the parts -------------------

const phone = matchMedia("(max-width: 699px)");
function order() {
  const order = phone.matches ? ["results", "new", "queue", "timeline"] : ["new", "results", "queue", "timeline"];
  const main = document.querySelector("main");
  main.append(...order.map((name) => main.querySelector(`.panel.${name}`)));
}
phone.addEventListener("change", order);
if (phone.matches) order();

// Updates ----------------------------------------------------------------------------------

let isDue = false;
live.addEventListener("change", () => {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    show();
  });
});
setInterval(show, 1000); // countdowns
addEventListener("keydown", (event) => event.key === "Escape" && picked.keep(null));
live.follow();
