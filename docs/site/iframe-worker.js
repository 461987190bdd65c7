// Browsers start no worker for a page that was opened from a folder. There, run the search in an invisible frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const home = new URL(url, document.baseURI);
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.title = "search";
      frame.srcdoc = "<!doctype html><title>search</title>";
      frame.addEventListener("load", () => {
        const inside = (this.inside = frame.contentWindow);
        const load = (source) =>
          new Promise((loaded, failed) => {
            const script = inside.document.createElement("script");
            script.src = new URL(source, home);
            script.onload = loaded;
            script.onerror = failed;
            inside.document.head.append(script);
          });
        inside.importScripts = (...sources) => sources.reduce((all, one) => all.then(() => load(one)), Promise.resolve());
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        load(home).then(() => {
          const waiting = this.waiting;
          this.waiting = null;
          waiting.forEach((data) => this.postMessage(data));
        });
      });
      document.body.append(frame);
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }));
    }

    terminate() {}
  };
}
