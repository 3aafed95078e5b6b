// The form: a model's defaults, errors at their fields, and submission.

import { ask, parse } from "./live.js";
import { byId, countdown, make, mark, ordinal, say, sentence, write } from "./words.js";

const SHOWN = ["prompt", "model", "image", "size", "frames", "steps", "seed", "deadline", "priority"];
const FIELDS = [...SHOWN, "negative_prompt", "tag"];
const FIELD_OF = { width: "size", height: "size", fps: "frames" };
const MOST = 2n ** 63n - 1n;
const WHOLE = { frames: [1, 4097], steps: [1, 1000], seed: [0, MOST], priority: [-1000000, 1000000] };
const SIZES = {
  video: ["832x480", "480x832", "1280x704", "704x1280"],
  image: ["512x512", "1024x1024", "1328x1328", "1664x928", "928x1664"],
};

export class Form {
  #live;
  #form = byId("form");
  #touched = new Set();
  #models = "";
  #key = null;
  #isBusy = false;
  #own = new Set(); // open jobs submitted on this page; their ends are announced

  constructor({ live }) {
    this.#live = live;
    for (const name of FIELDS) {
      const field = byId(name);
      field.setAttribute("aria-describedby", `${name}-wrong`);
      field.addEventListener("input", () => {
        this.#touched.add(name);
        this.#key = null; // a changed form is a new request
        this.#blame(name, "");
      });
    }
    byId("model").addEventListener("change", () => this.#suggest());
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.#form.requestSubmit();
    });
  }

  /** Update the models and the button after a change of the state. */
  show() {
    const { models, status } = this.#live.state;
    const names = JSON.stringify(models);
    if (names !== this.#models) {
      this.#models = names;
      const chosen = byId("model").value;
      const option = ({ id, kind }) => make("option", { value: id }, `${id} (${kind})`);
      byId("model").replaceChildren(...models.map(option));
      if (models.some((model) => model.id === chosen)) byId("model").value = chosen;
      this.#suggest();
    }
    mark(byId("send"), "aria-disabled", status === "ready" && !this.#isBusy ? null : "true");
    for (const job of this.#own.size ? this.#live.finished : []) {
      if (this.#own.delete(job.id)) say(`${sentence(job.status)} ${job.prompt}`);
    }
  }

  /** Copy the settings of another job. */
  fill(job) {
    const values = {
      prompt: job.prompt, model: job.model, size: job.size, frames: job.frames ?? "", steps: job.steps,
      seed: job.seed, priority: job.priority || "", tag: job.tag ?? "",
    };
    for (const [name, value] of Object.entries(values)) {
      byId(name).value = value;
      this.#touched.add(name);
    }
    this.#key = null;
    this.#blameNothing();
    this.#suggest();
    byId("prompt").focus();
    write(byId("sent"), "Settings copied. Change the seed for a different result.");
  }

  get #model() {
    return this.#live.state.models.find((model) => model.id === byId("model").value);
  }

  /** Put the model's defaults into untouched fields. */
  #suggest() {
    const model = this.#model;
    if (!model) return;
    const defaults = model.defaults ?? {};
    for (const name of ["size", "frames", "steps"]) {
      const field = byId(name);
      if (!this.#touched.has(name) || field.value === "") field.value = defaults[name] ?? "";
      field.placeholder = defaults[name] ?? "";
      this.#blame(name, "");
    }
    byId("frames-field").hidden = model.kind === "image";
    write(byId("frames-hint"), defaults.fps ? `${defaults.fps} fps` : "");
    const takesImage = model.takes_image !== "no";
    byId("image-field").hidden = !takesImage;
    write(byId("image-hint"), model.takes_image === "always" ? "required" : "optional");
    const sizes = new Set([defaults.size, ...SIZES[model.kind]].filter(Boolean));
    byId("sizes").replaceChildren(...[...sizes].map((size) => make("option", { value: size })));
  }

  async #submit() {
    if (byId("send").getAttribute("aria-disabled") === "true") {
      if (!this.#isBusy) this.#tell(this.#live.state?.reason ?? "The server accepts no jobs now.", "bad");
      return;
    }
    this.#blameNothing();
    const wrong = this.#mistakes();
    if (wrong.length) {
      for (const [name, text] of wrong) this.#blame(name, text);
      this.#go(wrong[0][0]);
      this.#tell(`Correct ${wrong.length} ${wrong.length === 1 ? "field" : "fields"}.`, "bad");
      return;
    }
    // The server makes one job for all requests with the same key.
    this.#key ??= [...crypto.getRandomValues(new Uint32Array(4))].map((part) => part.toString(36)).join("-");
    this.#wait(true);
    try {
      const answer = await ask("POST", "/v1/jobs", { form: this.#body(), key: this.#key });
      this.#accepted(parse(await answer.text()));
    } catch (problem) {
      this.#refused(problem);
    } finally {
      this.#wait(false);
    }
  }

  #wait(isBusy) {
    this.#isBusy = isBusy;
    write(byId("send"), isBusy ? "Submitting" : "Submit");
    this.show();
  }

  #body() {
    const body = new FormData();
    for (const name of FIELDS) {
      const field = byId(name);
      if (field.closest("[hidden]")) continue;
      const value = name === "image" ? field.files[0] : field.value.trim();
      if (value) body.append(name, value);
    }
    return body;
  }

  /** Errors found without a request: [field, message]. */
  #mistakes() {
    const wrong = [];
    const blame = (name, text) => wrong.push([name, text]);
    if (!byId("prompt").value.trim()) blame("prompt", "Describe what you want to see.");
    const needsImage = this.#model?.takes_image === "always";
    if (needsImage && !byId("image").files.length) blame("image", "This model needs an image.");
    const size = byId("size").value.trim();
    if (size && !/^\d{1,9} *x *\d{1,9}$/i.test(size)) blame("size", "Width x height, like 832x480.");
    for (const [name, [low, high]] of Object.entries(WHOLE)) {
      const text = byId(name).value.trim();
      if (!text || byId(name).closest("[hidden]")) continue;
      const isWhole = /^-?\d{1,20}$/.test(text);
      if (isWhole && BigInt(text) >= low && BigInt(text) <= high) continue;
      const most = high === MOST ? "2^63 - 1" : high.toLocaleString();
      blame(name, `A whole number from ${low.toLocaleString()} to ${most}.`);
    }
    return wrong;
  }

  #accepted(job) {
    this.#key = null;
    this.#own.add(job.id);
    const { position, predicted_completion_at: endsAt } = job;
    const place = position ? `, ${position === 1 ? "next" : ordinal(position)} in the queue` : "";
    const ends = endsAt ? `, done in ${countdown(endsAt - this.#live.now())}` : "";
    this.#tell(`Accepted${place}${ends}.`, "good");
  }

  #refused(problem) {
    const name = FIELD_OF[problem.param] ?? problem.param;
    if (FIELDS.includes(name) && !byId(name).closest("[hidden]")) {
      const text = problem.message.replace(new RegExp(`^${problem.param}:\\s*`), "");
      this.#blame(name, text);
      this.#go(name);
      this.#tell("Not accepted.", "bad");
      return;
    }
    const later = problem.retryAfter ? ` Try again in ${countdown(problem.retryAfter)}.` : "";
    this.#tell(`${sentence(problem.message)}${later}`, "bad");
  }

  /** Focus an invalid field, and unfold it if it is hidden. */
  #go(name) {
    const folded = byId(name).closest("details");
    if (folded) folded.open = true;
    byId(name).focus();
  }

  #tell(text, kind) {
    write(byId("sent"), text);
    byId("sent").dataset.kind = kind;
  }

  #blame(name, text) {
    write(byId(`${name}-wrong`), text && sentence(text));
    mark(byId(name), "aria-invalid", text ? "true" : null);
  }

  #blameNothing() {
    for (const name of FIELDS) this.#blame(name, "");
    this.#tell("", "");
  }
}
