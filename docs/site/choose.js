// Form of the page "Choose": estimates a training step from a few numbers, with the formulas of that page.
// tests/unit/test_choose.py compares them with the model of `mpicomp advise`.
"use strict";

const LATENCY_S = 50e-6; // between neighbours: 18 to 67 us on the emulated clusters
const CALL_S = 0.4e-3; // constant part of a call
const PAYLOAD = 1448 / 1514; // of a link's rate, after the headers of TCP and Ethernet
const LOCAL_STEPS = 30; // of SparseLoCo
const WORTH = 1.05; // gain of a step that justifies compression, and difference that counts, as in `mpicomp advise`
const ACCURACY = 1.2; // all-reduces within this factor count as equally fast

// codec_ns: processor time of a rank per element; first: the part of it before the first message.
// grade: learning record, 1 is the best. bytes: sent through the link of a node; rounds: messages one after another.
const METHODS = [
  {
    name: "dense", page: "dense.html", codec_ns: 0.80, first: 0, grade: 0,
    bytes: (n, ranks) => 2 * ((ranks - 1) / ranks) * 4 * n, rounds: (ranks) => 2 * (ranks - 1),
  },
  {
    name: "marsit-100", page: "marsit.html", codec_ns: 0.70, first: 0, grade: 2, every: 100,
    bytes: (n, ranks) => 2 * ((ranks - 1) / ranks) * (n / 8), rounds: (ranks) => 2 * (ranks - 1),
  },
  {
    name: "marsit", page: "marsit.html", codec_ns: 0.70, first: 0, grade: 2,
    bytes: (n, ranks) => 2 * ((ranks - 1) / ranks) * (n / 8), rounds: (ranks) => 2 * (ranks - 1),
  },
  {
    name: "relay", page: "relay.html", codec_ns: 0.90, first: 0, grade: 2,
    bytes: (n, ranks) => 2 * ((ranks - 1) / ranks) * (2.125 * n / 8), rounds: (ranks) => 2 * (ranks - 1),
  },
  {
    name: "double-squeeze", page: "double-squeeze.html", codec_ns: 1.65, first: 0, grade: 2,
    bytes: (n, ranks, perNode) => 2 * perNode * ((ranks - perNode) / ranks) * (1.001 * n / 8), rounds: () => 2,
  },
  {
    name: "scalecom", page: "scalecom.html", codec_ns: 1.36, first: 0.45, grade: 3, withoutMomentum: true,
    bytes: (n, ranks) => 2 * ((ranks - 1) / ranks) * (n / 100) * (4 + (7 * ranks) / (16 * (ranks - 1))),
    rounds: (ranks) => 2 * (ranks - 1),
  },
  {
    name: "sparse-loco", page: "sparse-loco.html", codec_ns: 1.90, first: 0.55, grade: 3, localSteps: true,
    bytes: (n, ranks) => (ranks - 1) * (n / 64) * (14 / 8), rounds: (ranks) => ranks - 1,
  },
];

/** Seconds of one all-reduce. job: {n, perNode, nodes, bitsPerSecond, computeS}. */
function callSeconds(method, job) {
  const ranks = job.perNode * job.nodes;
  const codec = 1e-9 * method.codec_ns * job.n;
  const before = method.first * codec;
  const latency = LATENCY_S * method.rounds(ranks);
  const transfer = (8 * method.bytes(job.n, ranks, job.perNode)) / (PAYLOAD * job.bitsPerSecond);
  const path = job.perNode === 1 ? latency + transfer : Math.max(latency, transfer);
  return CALL_S + before + Math.max(path, codec - before);
}

/** All rows, dense first: {name, seconds, stepS, bytes} per training step. */
function estimate(job) {
  const ranks = job.perNode * job.nodes;
  const dense = METHODS[0];
  return METHODS.map((method) => {
    let seconds = callSeconds(method, job);
    let bytes = method.bytes(job.n, ranks, job.perNode);
    if (method.every) { // full-precision rounds
      seconds += (callSeconds(dense, job) - seconds) / method.every;
      bytes += (dense.bytes(job.n, ranks) - bytes) / method.every;
    }
    if (method.localSteps) {
      seconds /= LOCAL_STEPS;
      bytes /= LOCAL_STEPS;
    }
    return { name: method.name, seconds, stepS: seconds + job.computeS, bytes };
  });
}

/** Name of the recommended method, by the rule of `mpicomp advise`. */
function recommend(job, rows = estimate(job)) {
  const denseS = rows[0].stepS;
  const allowed = METHODS.slice(1).filter(
    (method) => (job.withoutMomentum || !method.withoutMomentum) && (job.localSteps || !method.localSteps),
  );
  const candidates = allowed.map((method) => ({ ...rows.find((row) => row.name === method.name), grade: method.grade }));
  const fastest = candidates.reduce((best, row) => (row.stepS < best.stepS ? row : best));
  const asFast = candidates.filter(
    (row) =>
      denseS >= WORTH * row.stepS &&
      (row.stepS < WORTH * fastest.stepS || row.seconds < ACCURACY * fastest.seconds),
  );
  asFast.sort((a, b) => a.grade - b.grade || a.stepS - b.stepS);
  return asFast.length ? asFast[0].name : "dense";
}

// The form ------------------------------------------------------------------------------------------------------------

const FIELDS = [
  { key: "millions", label: "Trainable parameters, millions", value: 125, min: 4, max: 100000 },
  { key: "nodes", label: "Nodes", value: 4, min: 2, max: 64, whole: true },
  { key: "perNode", label: "Ranks per node", value: 1, min: 1, max: 64, whole: true },
  { key: "gbits", label: "Rate of a node's link, Gbit/s", value: 1, min: 0.01, max: 25 },
  { key: "computeMs", label: "Step without communication, ms", value: 200, min: 0, max: 1000000 },
];
const BOXES = [
  { key: "withoutMomentum", label: "The optimizer is SGD without momentum" },
  { key: "localSteps", label: `Ranks may synchronize every ${LOCAL_STEPS} steps, in a training of many thousands` },
];

// The theme of the site removes frames and outlines of inputs.
const STYLE = `
  #which-form p { display: flex; flex-wrap: wrap; gap: 0.2em 0.6em; margin: 0.5em 0; align-items: baseline; }
  #which-form input[type="number"] {
    border: 1px solid; padding: 0.2em 0.4em; width: 8em; font: inherit; color: inherit; background: transparent;
  }
  #which-form label:first-child { min-width: 17em; }
  #which-form input[type="checkbox"] + label { flex: 1; }
  #which-form input:focus-visible { outline: 3px solid; outline-offset: 2px; }
  #which-advice { font-weight: bold; }
`;

function duration(seconds) {
  return seconds >= 1 ? `${+seconds.toPrecision(3)} s` : `${+(1e3 * seconds).toPrecision(3)} ms`;
}

function size(bytes) {
  return bytes >= 1e9 ? `${+(bytes / 1e9).toPrecision(3)} GB` : `${+(bytes / 1e6).toPrecision(3)} MB`;
}

function element(name, properties = {}, children = []) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function makeForm(place) {
  const inputs = {};
  const labelled = (field, input) => {
    inputs[field.key] = input;
    const label = element("label", { htmlFor: input.id, textContent: field.label });
    return element("p", {}, input.type === "checkbox" ? [input, " ", label] : [label, " ", input]);
  };
  const numbers = FIELDS.map((field) =>
    labelled(field, element("input", {
      id: `which-${field.key}`, type: "number", value: field.value, min: field.min, max: field.max,
      step: field.whole ? 1 : "any", required: true,
    })));
  const boxes = BOXES.map((box) => labelled(box, element("input", { id: `which-${box.key}`, type: "checkbox" })));
  const form = element("form", { id: "which-form" }, [
    element("fieldset", {}, [element("legend", { textContent: "Your job" }), ...numbers, ...boxes]),
  ]);
  const advice = element("p", { id: "which-advice" });
  advice.setAttribute("role", "status");
  const body = element("tbody");
  const heads = ["method", "all-reduce per step", "step", "of dense", "sent by a node per step"];
  const table = element("table", {}, [
    element("caption", { textContent: "Estimated step with each method" }),
    element("thead", {}, [element("tr", {}, heads.map((text) => element("th", { scope: "col", textContent: text })))]),
    body,
  ]);

  const update = () => {
    const wrong = FIELDS.find((field) => !inputs[field.key].checkValidity());
    if (wrong) {
      const kind = wrong.whole ? "a whole number" : "a number";
      advice.textContent = `${wrong.label}: enter ${kind} from ${wrong.min} to ${wrong.max}.`;
      body.replaceChildren();
      return;
    }
    const job = {
      n: 1e6 * inputs.millions.valueAsNumber, nodes: inputs.nodes.valueAsNumber,
      perNode: inputs.perNode.valueAsNumber, bitsPerSecond: 1e9 * inputs.gbits.valueAsNumber,
      computeS: 1e-3 * inputs.computeMs.valueAsNumber,
      withoutMomentum: inputs.withoutMomentum.checked, localSteps: inputs.localSteps.checked,
    };
    const rows = estimate(job);
    const best = recommend(job, rows);
    const row = rows.find((one) => one.name === best);
    advice.textContent = best === "dense"
      ? `Stay dense: a step takes ${duration(row.stepS)}, and compression would not make it 5 % faster.`
      : `Try ${best}: a step takes about ${duration(row.stepS)} instead of ${duration(rows[0].stepS)}, ` +
        `${(rows[0].stepS / row.stepS).toFixed(1)} times as fast. ` +
        (METHODS.find((method) => method.name === best).grade > 2 ? "It ended behind dense in some trainings. " : "") +
        "Measure with mpicomp advise, and compare the accuracy with dense.";
    body.replaceChildren(...rows.map((one, index) => {
      const link = element("a", { href: METHODS[index].page, textContent: one.name });
      const cells = [duration(one.seconds), duration(one.stepS), `${(rows[0].stepS / one.stepS).toFixed(2)}x`, size(one.bytes)];
      return element("tr", {}, [
        element("th", { scope: "row" }, [link]),
        ...cells.map((text) => element("td", { textContent: text })),
      ]);
    }));
  };
  form.addEventListener("input", update);
  form.addEventListener("submit", (event) => event.preventDefault());
  place.replaceChildren(element("style", { textContent: STYLE }), form, advice, table);
  update();
}

if (typeof module !== "undefined") {
  module.exports = { callSeconds, estimate, recommend, METHODS };
} else {
  document.addEventListener("DOMContentLoaded", () => {
    const place = document.getElementById("choose-form");
    if (place) makeForm(place);
  });
}
