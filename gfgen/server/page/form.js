// The form: a model's defaults, errors at their fields, and submission.

import { estimate, seconds, variations } from "./cost.js";
import { ask, newKey, parse } from "./live.js";
import { Picture } from "./picture.js";
import { byId, counted, countdown, duration, make, mark, ordinal, say, sentence, write } from "./words.js";

const SHOWN = ["prompt", "model", "recipe", "size", "frames", "fps", "steps", "guidance", "seed", "deadline"];
const FIELDS = [...SHOWN, "priority", "negative_prompt", "tag"];
const MOST_TEXTS = 100; // choices of one prompt
const INPUTS = [...FIELDS, "number"];
const PLACE_OF = { image: "image-field", lora: "patches-field" }; // hidden where the model takes none
const FIELD_OF = { width: "size", height: "size", guidance_scale: "guidance", true_cfg_scale: "guidance" };
const MOST = 2n ** 63n - 1n; // largest seed
const isMask = (name) => ["mask_image", "mask"].includes(name);
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
    this.picture = new Picture({
      changed: () => {
        this.#key = null;
        this.#blame("image", "");
        this.#showCost();
      },
      wanted: () => this.choosePictureModel(),
    });
    for (const name of [...INPUTS, "vary"]) {
      const field = byId(name);
      if (name !== "vary") field.setAttribute("aria-describedby", `${name}-wrong`);
      field.addEventListener("input", () => {
        this.#touched.add(name);
        this.#key = null; // a changed form is a new request
        if (name !== "vary") this.#blame(name, "");
        if (name === "recipe") this.#suggest();
        this.#showCost();
      });
    }
    byId("image").setAttribute("aria-describedby", "image-tip image-wrong");
    byId("mask-open").setAttribute("aria-describedby", "image-wrong");
    byId("prompt").addEventListener("input", () => this.#grow());
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
    this.#showCost();
    for (const job of this.#own.size ? this.#live.finished : []) {
      if (this.#own.delete(job.id)) say(`${sentence(job.status)} ${job.prompt}`);
    }
  }

  /** Copy a job's line: all that the form has; the other fields become empty. Its files must be chosen again. */
  fill(line) {
    const { models } = this.#live.state;
    const served = models.find(({ id }) => id === line.model) ?? models.find(({ root }) => root === line.model);
    byId("model").value = (served ?? models[0])?.id ?? "";
    byId("recipe").value = "";
    if (this.#model) this.#offer(this.#model);
    const { width, height } = line;
    const size = width && height ? `${width}x${height}` : "";
    const values = { ...line, size, guidance: line[this.#guidanceName], priority: line.priority || "" };
    for (const name of INPUTS) {
      if (name === "model") continue;
      byId(name).value = values[name] ?? "";
      values[name] == null ? this.#touched.delete(name) : this.#touched.add(name);
    }
    if (byId("recipe").selectedIndex < 0) byId("recipe").value = "";
    this.#key = null;
    this.picture.clear();
    this.#blameNothing();
    this.#suggest();
    const lacking = [...this.#lacking(line), ...this.#choose(line.lora ?? [])];
    if (line.model && !served) lacking.unshift("model");
    this.#grow();
    byId("vary").checked = !line.prompt.includes("{"); // the braces of a job are text
    this.#showCost();
    byId("prompt").focus();
    const files = Object.keys(line.files ?? {});
    const inputs = [line.image || files.includes("image") ? "start image" : "", files.some(isMask) ? "mask" : ""];
    const again = inputs.filter(Boolean).join(" and ");
    this.#tell([
      line.seed == null ? "Settings copied without the seed." : "Settings copied.",
      again && `Choose its ${again} again.`,
      line.seed == null ? "" : "Change the seed for a different result.",
      lacking.length && `Not copied, because the form lacks it: ${lacking.join(", ")}.`,
    ].filter(Boolean).join(" "), lacking.length ? "bad" : "");
  }

  /** The names in a line that the form has no field for, or no such choice. */
  #lacking(line) {
    const held = FIELDS.filter((name) => byId(name).value && !byId(name).closest("[hidden]"));
    const known = new Set(["model", "lora", "image", "files", ...held.filter((name) => name !== "guidance")]);
    if (held.includes("guidance")) known.add(this.#guidanceName);
    if (line.width && line.height) known.add("width").add("height");
    if (!line.priority) known.add("priority");
    if (!line.negative_prompt) known.add("negative_prompt");
    if (this.#model?.kind === "image") known.add("frames").add("fps");
    const files = Object.keys(line.files ?? {}).filter((name) => name !== "image" && !isMask(name));
    return [...Object.keys(line).filter((name) => !known.has(name)), ...files.map((name) => `files.${name}`)];
  }

  /** Check these LoRAs alone; returns the names of those that the form does not have. */
  #choose(entries) {
    const chosen = new Set();
    for (const row of byId("patches").children) {
      const [box, scale] = row.querySelectorAll("input");
      const entry = entries.find(({ name, target, partial }) => name === box.value && !target && !partial);
      box.checked = Boolean(entry);
      scale.value = entry?.scale ?? 1;
      chosen.add(entry);
    }
    return entries.filter((entry) => !chosen.has(entry)).map(({ name }) => `lora ${name}`);
  }

  get #model() {
    return this.#live.state?.models.find((model) => model.id === byId("model").value);
  }

  /** The model that takes a start image: the chosen one, or the first one; null if there is none. */
  get modelForPictures() {
    const able = (this.#live.state?.models ?? []).filter((model) => model.takes_image !== "no");
    return able.find((model) => model.id === byId("model").value) ?? able[0] ?? null;
  }

  choosePictureModel() {
    const model = this.modelForPictures;
    if (model && byId("model").value !== model.id) {
      byId("model").value = model.id;
      this.#suggest();
    }
    return model !== null;
  }

  /** The prompt's field is as high as its text. */
  #grow() {
    const field = byId("prompt");
    field.style.height = "auto";
    field.style.height = `${Math.min(field.scrollHeight + 2, innerHeight * 0.4)}px`;
  }

  /** The texts that the prompt stands for. */
  get #texts() {
    const text = byId("prompt").value.trim();
    return (byId("vary").checked && /\{[^{}]*\|[^{}]*\}/.test(text) && variations(text)) || [text];
  }

  /** How many jobs, what they cost, and whether they meet their deadline. */
  #showCost() {
    const all = variations(byId("prompt").value.trim()) ?? [""];
    byId("vary-field").hidden = all.length < 2;
    write(byId("vary-text"), `Make all ${all.length.toLocaleString()} variations`);
    const asked = Math.floor(Number(byId("number").value.trim() || 1)) || 1;
    const number = this.#texts.length * Math.max(1, asked);
    if (!this.#isBusy) write(byId("send"), number > 1 ? `Submit ${number.toLocaleString()} jobs` : "Submit");
    const value = (name) => byId(name).value.trim() || byId(name).placeholder;
    const [size, frames, steps] = ["size", "frames", "steps"].map(value);
    const model = this.#model;
    const own = { model: model?.root ?? model?.id, size, steps, number, frames: model?.kind === "image" ? 1 : frames };
    const cost = model ? estimate(this.#live, own) : null;
    if (!cost) return this.#tellCost(model ? "The first job shows what one costs." : "", "");
    const each = `${duration(cost.each)} of ${/cpu/i.test(this.#live.state.device) ? "rank" : "GPU"} time`;
    const due = seconds(byId("deadline").value.trim());
    const slack = due === null ? 0 : due - cost.ends;
    const late = slack < 0 ? `, \u2717 ${countdown(-slack)} late` : due === null ? "" : ", \u2713 in time";
    const what = number > 1 ? "all done" : "done";
    this.#tellCost(`About ${each}${number > 1 ? " each" : ""}, ${what} in ${countdown(cost.ends)}${late}`,
      slack < 0 ? "bad" : "");
  }

  #tellCost(text, kind) {
    write(byId("cost"), text);
    mark(byId("cost"), "data-kind", kind);
  }

  /** The model's recipes and LoRAs. */
  #offer({ recipes = [], patches = [] }) {
    byId("recipe-field").hidden = !recipes.length;
    const chosen = byId("recipe").value;
    const options = [["", "none"], ...recipes.map((name) => [name, name])];
    byId("recipe").replaceChildren(...options.map(([value, text]) => make("option", { value }, text)));
    if (recipes.includes(chosen)) byId("recipe").value = chosen;
    byId("patches-field").hidden = !patches.length;
    const known = [...byId("patches").querySelectorAll("[type=checkbox]")].map((box) => box.value);
    if (known.join("\n") === patches.join("\n")) return;
    const entry = (name) => {
      const box = make("input", { type: "checkbox", value: name });
      const scale = make("input", { inputMode: "decimal", value: "1", maxLength: 6, "aria-label": `Scale of ${name}` });
      return make("li", {}, make("label", { class: "check" }, box, make("span", {}, name)), scale);
    };
    byId("patches").replaceChildren(...patches.map(entry));
    byId("patches").oninput = () => (this.#key = null);
  }

  /** The chosen LoRAs, as `lora` has them. */
  get #patches() {
    if (byId("patches-field").hidden) return [];
    const rows = [...byId("patches").children].filter((row) => row.querySelector("[type=checkbox]").checked);
    return rows.map((row) => {
      const [box, scale] = row.querySelectorAll("input");
      return { name: box.value, scale: Number(scale.value.replace(",", ".") || 1) };
    });
  }

  /** Put the model's defaults into untouched fields. */
  #suggest() {
    const model = this.#model;
    if (!model) return;
    this.#offer(model);
    this.picture.fit(model);
    const defaults = { ...model.defaults };
    if (byId("recipe").value) delete defaults.steps; // the recipe has them
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
    const texts = this.#texts;
    const number = Number(byId("number").value.trim() || 1) * texts.length;
    const jobs = [];
    this.#wait(true);
    try {
      const mask = byId("image-field").hidden ? null : await this.picture.maskFile();
      for (let place = 0; place < number; place += 1) {
        const key = place ? `${this.#key}-${place}` : this.#key;
        const form = this.#body(Math.floor(place / texts.length), texts[place % texts.length], mask);
        jobs.push(parse(await (await ask("POST", "/v1/jobs", { form, key })).text()));
        this.#own.add(jobs.at(-1).id);
        if (number > 1) write(byId("send"), `${place + 1} of ${number}`);
      }
      this.accepted(jobs);
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
    if (isBusy) write(byId("send"), "Submitting");
    this.show();
  }

  /** The request for one of several jobs, which count the seed up. */
  #body(place, prompt, mask) {
    const body = new FormData();
    for (const name of FIELDS) {
      const field = byId(name);
      if (field.closest("[hidden]")) continue;
      let value = name === "prompt" ? prompt : field.value.trim();
      if (name === "seed" && value) value = String((BigInt(value) + BigInt(place)) % (MOST + 1n));
      if (value) body.append(name === "guidance" ? this.#guidanceName : name, value);
    }
    if (this.picture.file && !byId("image-field").hidden) body.append("image", this.picture.file);
    if (mask) body.append(`files[${this.picture.maskArgument}]`, mask);
    if (this.#patches.length) body.append("lora", JSON.stringify(this.#patches));
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
    if (needsImage && !this.picture.file) blame("image", "This model needs an image.");
    if (this.#texts.length > MOST_TEXTS) blame("prompt", `At most ${MOST_TEXTS} variations; a job file takes more.`);
    if (this.#patches.some(({ scale }) => !Number.isFinite(scale))) blame("lora", "A scale is a number like 0.8.");
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

  accepted(jobs) {
    this.#key = null;
    for (const job of jobs) this.#own.add(job.id);
    if (jobs.length > 1) return this.#tell(`${jobs.length} jobs accepted.`, "good");
    const { position, predicted_completion_at: endsAt } = jobs[0];
    const place = position ? `, ${position === 1 ? "next" : ordinal(position)} in the queue` : "";
    const ends = endsAt ? `, done in ${countdown(endsAt - this.#live.now())}` : "";
    this.#tell(`Accepted${place}${ends}.`, "good");
  }

  #refused(problem, before) {
    const isOfMask = problem.param === `files.${this.#model?.mask_argument}`;
    const name = isOfMask ? "image" : FIELD_OF[problem.param] ?? problem.param;
    if ([...FIELDS, "image", "lora"].includes(name) && !byId(PLACE_OF[name] ?? name).closest("[hidden]")) {
      const text = problem.message.replace(new RegExp(`^${problem.param}:\\s*`), "");
      this.#blame(name, isOfMask ? `Mask: ${text}` : text);
      this.#go(name);
      this.#tell(before || "Not accepted.", "bad");
      return;
    }
    const later = problem.retryAfter ? ` Try again in ${countdown(problem.retryAfter)}.` : "";
    this.#tell(`${before}${sentence(problem.message)}${later}`, "bad");
  }

  /** Focus an invalid field, and unfold it if it is hidden. */
  #go(name) {
    const shown = ["image", "mask-open", "picture-remove"].map(byId).find((each) => !each.closest("[hidden]"));
    const field = { lora: byId("patches").querySelector("input"), image: shown }[name] ?? byId(name);
    const folded = field.closest("details");
    if (folded) folded.open = true;
    field.focus();
  }

  #tell(text, kind) {
    write(byId("sent"), text);
    byId("sent").dataset.kind = kind;
  }

  #blame(name, text) {
    write(byId(`${name}-wrong`), text && sentence(text));
    if (name !== "lora") mark(byId(name), "aria-invalid", text ? "true" : null);
  }

  #blameNothing() {
    for (const name of [...INPUTS, "image", "lora"]) this.#blame(name, "");
    this.#tell("", "");
  }
}
