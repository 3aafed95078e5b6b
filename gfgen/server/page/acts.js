// What one does with a result: the same buttons below the newest one and in the lightbox.

import { ask, at, newKey, parse } from "./live.js";
import { byId, make, mark, say, write } from "./words.js";

export class Acts {
  #live;
  #form;
  #picture;

  constructor({ live, form, picture }) {
    [this.#live, this.#form, this.#picture] = [live, form, picture];
  }

  /** The buttons for a job; `left` is called before one that leads to the form, `failed` with an error. */
  buttons(job, { left = () => {}, failed = say } = {}) {
    const button = (text, act) => {
      const made = make("button", { type: "button" }, text);
      made.addEventListener("click", async () => {
        try {
          await act(made);
        } catch (problem) {
          failed(problem.message);
        }
      });
      return made;
    };
    const isDone = job.status === "completed";
    const save = make("a", { class: "button", href: at(job.content_url), download: nameOf(job) }, "Download");
    const star = button("", () => this.favour(job, star));
    showStar(star, job.favourite);
    const first = button("Another seed", () => this.#another(job, left));
    const use = button("Use again", async () => {
      const line = await this.#line(job);
      left();
      this.#form.fill(line);
    });
    const start = button("Use as start image", async () => {
      await this.#start(job);
      left();
      byId("prompt").focus();
    });
    const copy = button("Copy job line", () => this.#copy(job));
    const canStart = isDone && job.object === "image" && this.#form.modelForPictures;
    return [...(isDone ? [star] : []), first, use, ...(canStart ? [start] : []), copy, ...(isDone ? [save] : [])];
  }

  async favour(job, star = null) {
    await this.#live.favour(job.id, !job.favourite);
    const isNow = this.#live.job(job.id)?.favourite ?? false;
    if (star) showStar(star, isNow);
    say(isNow ? `Favourite: ${job.prompt}` : `No favourite: ${job.prompt}`);
  }

  /** Submit the same job without its seed; one with files, which the server has removed, goes to the form. */
  async #another(job, left) {
    const { seed, ...line } = await this.#line(job);
    if (line.image || line.files) {
      left();
      return this.#form.fill(line);
    }
    const made = parse(await (await ask("POST", "/v1/jobs", { json: line, key: newKey() })).text());
    this.#form.accepted([made]);
    say(`Submitted with another seed: ${job.prompt}`);
  }

  async #start(job) {
    const content = await (await ask("GET", job.content_url)).blob();
    this.#form.choosePictureModel();
    await this.#picture.take(new File([content], nameOf(job), { type: content.type }));
  }

  async #line(job) {
    return parse(await (await ask("GET", `/v1/jobs/${encodeURIComponent(job.id)}/line`)).text());
  }

  async #copy(job) {
    const text = JSON.stringify(await this.#line(job)).replace(/"seed":"(\d+)"/, '"seed":$1');
    try {
      await navigator.clipboard.writeText(text); // browsers have this on localhost and with HTTPS alone
    } catch {
      const sheet = make("textarea", { class: "unseen", value: text });
      (document.querySelector("dialog[open]") ?? document.body).append(sheet);
      sheet.select();
      document.execCommand("copy");
      sheet.remove();
    }
    say("The job line is copied");
  }
}

export const nameOf = (job) => `${job.id}.${job.object === "video" ? "mp4" : "png"}`;

/** The live state has the first 300 characters of a prompt. */
export async function complete(job) {
  return job.prompt.length < 300 ? job : parse(await (await ask("GET", `/v1/jobs/${job.id}`)).text());
}

function showStar(button, isFavourite) {
  write(button, isFavourite ? "\u2605 Favourite" : "\u2606 Favourite");
  mark(button, "aria-pressed", Boolean(isFavourite));
}
