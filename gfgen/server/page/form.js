// The form: a model's defaults, errors at their fields, and submission.

import { ask, parse } from "./live.js";
import { byId, counted, countdown, make, mark, ordinal, say, sentence, write } from "./words.js";

const SHOWN = ["prompt", "model", "image", "size", "frames", "fps", "steps", "guidance", "seed", "deadline"];
const FIELDS = [...SHOWN, "priority", "negative_prompt", "tag"];
const INPUTS = [...FIELDS, "number"];
const FIELD_OF = { width: "size", height: "size", guidance_scale: "guidance", true_cfg_scale: "guidance" };
const MOST = 2n ** 63n - 1n; // largest seed
const WHOLE = {
  frames: [1, 4097], fps: [1, 240], steps: [1, 1000], number: [1, 100], seed: [0, MOST],
  priority: [-1000000, 1000000],
};
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
  #fileKey = null;
  #isBusy = false;
  #own = new Set(); // open jobs submitted on this page; their ends are announced

  constructor({ live }) {
    this.#live = live;
    for (const name of INPUTS) {
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
    byId("job-file").addEventListener("change", () => {
      this.#fileKey = null;
      write(byId("job-file-sent"), "");
    });
    byId("job-file-send").addEventListener("click", () => this.#sendFile());
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
      prompt: job.prompt, model: job.model, size: job.size, frames: job.frames ?? "", fps: job.fps ?? "",
      steps: job.steps, seed: job.seed, priority: job.priority || "", tag: job.tag ?? "", number: "",
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
    for (const name of ["frames", "fps"]) byId(`${name}-field`).hidden = model.kind === "image";
    const guidance = defaults.true_cfg_scale ?? defaults.guidance_scale ?? null;
    byId("guidance-field").hidden = guidance === null;
    byId("guidance").placeholder = guidance ?? "";
    byId("fps").placeholder = defaults.fps ?? "";
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
    this.#key ??= newKey();
    const number = Number(byId("number").value.trim() || 1);
    const jobs = [];
    this.#wait(true);
    try {
      for (let place = 0; place < number; place += 1) {
        const key = place ? `${this.#key}-${place}` : this.#key;
        const answer = await ask("POST", "/v1/jobs", { form: this.#body(place), key });
        jobs.push(parse(await answer.text()));
        this.#own.add(jobs.at(-1).id);
      }
      this.#accepted(jobs);
    } catch (problem) {
      this.#refused(problem, jobs.length ? `${jobs.length} of ${number} accepted. ` : "");
    } finally {
      this.#wait(false);
    }
  }

  /** Submit a job file; the server accepts all of its jobs or none. */
  async #sendFile() {
    const [file, said] = [byId("job-file").files[0], byId("job-file-sent")];
    if (!file) return write(said, "Choose a file.");
    const form = new FormData();
    form.append("file", file);
    this.#fileKey ??= newKey();
    write(said, "Sending");
    said.dataset.kind = "";
    try {
      const batch = parse(await (await ask("POST", "/v1/batches", { form, key: this.#fileKey })).text());
      write(said, `${counted(batch.request_counts.total, "job")} accepted.`);
      said.dataset.kind = "good";
      byId("job-file").value = "";
      this.#fileKey = null;
    } catch (problem) {
      write(said, sentence(problem.message));
      said.dataset.kind = "bad";
    }
  }

  #wait(isBusy) {
    this.#isBusy = isBusy;
    write(byId("send"), isBusy ? "Submitting" : "Submit");
    this.show();
  }

  /** The request for one of several jobs, which count the seed up. */
  #body(place) {
    const body = new FormData();
    for (const name of FIELDS) {
      const field = byId(name);
      if (field.closest("[hidden]")) continue;
      let value = name === "image" ? field.files[0] : field.value.trim();
      if (name === "seed" && value) value = String((BigInt(value) + BigInt(place)) % (MOST + 1n));
      if (value) body.append(name === "guidance" ? this.#guidanceName : name, value);
    }
    return body;
  }

  get #guidanceName() {
    return this.#model?.defaults?.true_cfg_scale == null ? "guidance_scale" : "true_cfg_scale";
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
    const guidance = byId("guidance").value.trim();
    const isScale = /^\d{1,9}(\.\d{1,9})?$/.test(guidance);
    if (guidance && !isScale && !byId("guidance").closest("[hidden]")) blame("guidance", "A number like 4.5.");
    return wrong;
  }

  #accepted(jobs) {
    this.#key = null;
    if (jobs.length > 1) return this.#tell(`${jobs.length} jobs accepted.`, "good");
    const { position, predicted_completion_at: endsAt } = jobs[0];
    const place = position ? `, ${position === 1 ? "next" : ordinal(position)} in the queue` : "";
    const ends = endsAt ? `, done in ${countdown(endsAt - this.#live.now())}` : "";
    this.#tell(`Accepted${place}${ends}.`, "good");
  }

  #refused(problem, before) {
    const name = FIELD_OF[problem.param] ?? problem.param;
    if (FIELDS.includes(name) && !byId(name).closest("[hidden]")) {
      const text = problem.message.replace(new RegExp(`^${problem.param}:\\s*`), "");
      this.#blame(name, text);
      this.#go(name);
      this.#tell(before || "Not accepted.", "bad");
      return;
    }
    const later = problem.retryAfter ? ` Try again in ${countdown(problem.retryAfter)}.` : "";
    this.#tell(`${before}${sentence(problem.message)}${later}`, "bad");
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
    for (const name of INPUTS) this.#blame(name, "");
    this.#tell("", "");
  }
}

/** For the header Idempotency-Key: the server makes one job for all requests with the same key. */
function newKey() {
  return [...crypto.getRandomValues(new Uint32Array(4))].map((part) => part.toString(36)).join("-");
}
