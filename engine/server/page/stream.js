// The feed of server-sent events: read with fetch, which says why it failed, and taken up again when it breaks.

const FIRST_WAIT_S = 1, LONGEST_WAIT_S = 20;
const SILENCE_MS = 8000; // the server says something every two seconds
const HIDDEN_MS = 15000; // nobody looks: let the server rest

/**
 * Calls `on.event(name, data)` for each event, `on.open()` when a connection stands, `on.lost(why, seconds)` when
 * it does not and is tried again after so many seconds, `on.paused()` while the page is hidden.
 */
export class Stream {
  constructor(url, on) {
    this.url = url;
    this.on = on;
    this.failures = 0;
    this.controller = null;
    this.timer = null;
    document.addEventListener("visibilitychange", () => this.#seen());
    addEventListener("online", () => this.retry());
  }

  /** Connect now, if there is no connection. */
  retry() {
    clearTimeout(this.timer);
    if (this.controller === null) this.#connect();
  }

  #seen() {
    clearTimeout(this.hiding);
    if (!document.hidden) {
      this.retry();
    } else {
      this.hiding = setTimeout(() => {
        clearTimeout(this.timer);
        this.controller?.abort("hidden");
        this.on.paused();
      }, HIDDEN_MS);
    }
  }

  async #connect() {
    const controller = (this.controller = new AbortController());
    let why = "Connection lost";
    try {
      const response = await fetch(this.url, { cache: "no-store", signal: controller.signal });
      if (!response.ok) {
        why = await refusal(response);
      } else {
        await this.#read(response.body.getReader(), controller);
      }
    } catch (error) {
      if (error !== "hidden" && error !== "silent" && !(error instanceof TypeError) && error?.name !== "AbortError") {
        console.error(error);
      }
    }
    this.controller = null;
    if (controller.signal.reason === "hidden") return;
    const wait = Math.min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** this.failures);
    const seconds = wait * (0.75 + Math.random() / 2); // so that many pages do not come back at one instant
    this.failures += 1;
    this.on.lost(why, seconds);
    this.timer = setTimeout(() => this.#connect(), 1000 * seconds);
  }

  async #read(reader, controller) {
    const decoder = new TextDecoder();
    let text = "", isOpen = false;
    for (;;) {
      const silence = setTimeout(() => controller.abort("silent"), SILENCE_MS);
      const { done, value } = await reader.read().finally(() => clearTimeout(silence));
      if (done) return;
      if (!isOpen) {
        isOpen = true;
        this.failures = 0;
        this.on.open();
      }
      text += decoder.decode(value, { stream: true });
      const events = text.split("\n\n");
      text = events.pop();
      for (const event of events) this.#tell(event);
    }
  }

  #tell(event) {
    let name = "", data = "";
    for (const line of event.split("\n")) {
      if (line.startsWith("event: ")) name = line.slice(7);
      if (line.startsWith("data: ")) data += line.slice(6);
    }
    if (data) this.on.event(name, JSON.parse(data));
    else this.on.event("beat", null);
  }
}

/** Why the server refused, in its own words. */
async function refusal(response) {
  if (response.status === 401) return "The server asks for a key: reload the page to give one";
  try {
    const text = (await response.json()).error.message;
    return text.charAt(0).toUpperCase() + text.slice(1);
  } catch {
    return `The server answered with ${response.status}`;
  }
}
