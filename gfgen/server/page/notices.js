// Browser notifications of jobs that end while the page is not in front; off until the user turns them on.

import { byId, mark, say, sentence } from "./words.js";

export class Notices {
  #live;
  #seen = null; // ended jobs that were known at the last look
  #button = byId("notify");

  constructor({ live }) {
    this.#live = live;
    this.#button.hidden = !("Notification" in window) || !isSecureContext;
    this.#button.addEventListener("click", () => this.#toggle());
  }

  show() {
    mark(this.#button, "aria-pressed", this.#isOn);
    const { finished } = this.#live;
    const news = this.#seen ? finished.filter((job) => !this.#seen.has(job.id)) : [];
    this.#seen = new Set(finished.map((job) => job.id));
    const ended = news.filter((job) => job.status !== "cancelled");
    if (ended.length && this.#isOn && document.hidden) this.#notify(ended);
  }

  get #isOn() {
    return !this.#button.hidden && Notification.permission === "granted" && localStorage.notify === "yes";
  }

  async #toggle() {
    const wasOn = this.#isOn;
    localStorage.notify = wasOn ? "no" : "yes";
    if (!wasOn && (await Notification.requestPermission()) !== "granted") {
      this.#button.title = "The browser does not allow notifications of this page.";
      say(this.#button.title);
    }
    this.show();
  }

  /** One notification for all; the tag replaces the last one. */
  #notify(jobs) {
    const title = jobs.length === 1 ? `Job ${jobs[0].status}` : `${jobs.length} jobs have ended`;
    const body = jobs.map((job) => sentence(job.prompt.slice(0, 100))).join("\n");
    const notice = new Notification(title, { body, tag: "gfgen", icon: "page/icon.svg" });
    notice.addEventListener("click", () => window.focus());
  }
}
