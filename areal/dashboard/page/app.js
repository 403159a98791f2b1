// The page of `areal dash`. Every text of a run reaches the document as a text node or an attribute
// that holds no code: there is no innerHTML here. In an exported file the replies are embedded.
"use strict";

const VIEWS = [
  ["now", "Now"], ["seconds", "Seconds"], ["samples", "Samples"],
  ["prompts", "Prompts"], ["curves", "Curves"], ["config", "Config"], ["evals", "Evals"],
];
const KEYS = [
  ["1 … 7", "views"], ["r", "next run"], ["j, k", "next, previous row"], ["Enter", "open the row"],
  ["/", "search"], ["c", "next colour of tokens"], ["Esc", "back"], ["t", "light or dark"],
];
const REFRESH_MS = 3000;
const MAX_SPANS = 6000; // tokens drawn at first
const embeddedNode = document.getElementById("embedded");
const EMBEDDED = embeddedNode ? JSON.parse(embeddedNode.textContent) : null;
const main = document.getElementById("main");
const state = { runs: [], drawn: 0, colour: "logprob", timer: 0 };

// Documents

function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

function s(tag, props, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), props, children);
}

function fill(node, props, children) {
  for (const [key, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "style") for (const [name, one] of Object.entries(value)) node.style.setProperty(name, one);
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(9).filter((one) => one !== null && one !== undefined && one !== false));
  return node;
}

// Numbers

function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return (value / 1e6).toFixed(1) + "M";
  if (size >= 1e4) return (value / 1e3).toFixed(1) + "k";
  if (Number.isInteger(value)) return String(value);
  if (size !== 0 && size < 0.001) return value.toExponential(1);
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.1 ? 2 : 4);
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const minutes = Math.floor(seconds / 60);
  if (minutes >= 2880) return Math.floor(minutes / 1440) + " d " + (Math.floor(minutes / 60) % 24) + " h";
  return minutes >= 60 ? Math.floor(minutes / 60) + " h " + (minutes % 60) + " m" : minutes + " m " + Math.floor(seconds % 60) + " s";
}

function clock(time) {
  return time === null || time === undefined ? "–" : new Date(time * 1000).toLocaleString();
}

function percent(share) {
  return (share * 100).toFixed(share < 0.1 ? 1 : 0) + " %";
}

// Data

async function get(path, params) {
  const given = Object.entries(params || {}).filter(([, one]) => one !== "" && one !== null && one !== undefined);
  const query = new URLSearchParams(given).toString();
  if (EMBEDDED) return fromFile(path, query, params || {});
  const reply = await fetch("/api/" + path + (query ? "?" + query : ""));
  let value;
  try {
    value = await reply.json();
  } catch {
    throw new Error(reply.status === 401 ? "open the link that areal dash printed" : "the dashboard does not answer");
  }
  if (!reply.ok) throw new Error(value.error || reply.statusText);
  return value;
}

function fromFile(path, query, params) {
  const exact = EMBEDDED[query ? path + "?" + query : path];
  if (exact !== undefined) return exact;
  const whole = EMBEDDED[path];
  if (whole === undefined) throw new Error("this file does not hold it: look at the run with areal dash");
  return path.endsWith("/samples") ? { ...whole, samples: whole.samples.filter((one) => matches(one, params)) } : whole;
}

function matches(sample, wanted) {
  const bounds = [["step", "min_step", "max_step"], ["reward", "min_reward", "max_reward"], ["length", "min_length", "max_length"]];
  for (const [key, low, high] of bounds) {
    if (wanted[low] && !(sample[key] >= Number(wanted[low]))) return false;
    if (wanted[high] && !(sample[key] <= Number(wanted[high]))) return false;
  }
  if (wanted.state && wanted.state !== sample.state) return false;
  if (Number(wanted.offset)) return false;
  return [sample.prompt, sample.output].some((text) => text.toLowerCase().includes((wanted.text || "").toLowerCase()));
}

// Places: #view?run=0&...

function place() {
  const [view, query] = location.hash.slice(1).split("?");
  return { view: view || "now", params: Object.fromEntries(new URLSearchParams(query || "")) };
}

function link(view, params) {
  return "#" + view + "?" + new URLSearchParams({ run: currentRun(), ...params });
}

function go(view, params) {
  location.hash = link(view, params);
}

function currentRun() {
  const number = Number(place().params.run || 0);
  return state.runs.some((run) => run.id === number) ? number : 0;
}

// The frame

async function refreshRuns() {
  state.runs = await get("runs");
  const chosen = currentRun();
  const select = document.getElementById("run");
  select.replaceChildren(...state.runs.map((run) => h("option", { value: run.id, selected: run.id === chosen }, run.name)));
  const run = state.runs.find((one) => one.id === chosen);
  const chip = document.getElementById("state");
  chip.className = "chip " + (run ? run.state : "");
  chip.textContent = run ? run.state : "no run";
  document.title = run ? run.name + " · areal" : "areal";
  const { view } = place();
  const parent = { sample: "samples", prompt: "prompts", results: "evals" }[view] || view;
  document.getElementById("tabs").replaceChildren(
    ...VIEWS.map(([name, title]) => h("a", { href: link(name, {}), "aria-current": name === parent ? "page" : null }, title)),
  );
  return run;
}

async function draw(quietly) {
  const number = ++state.drawn;
  clearTimeout(state.timer);
  const { view, params } = place();
  const drawView = () => (DRAW[view] || drawNow)("run/" + currentRun() + "/", params);
  // The list of runs and the view at once, but for the first time, when no run is known.
  const early = state.runs.length ? drawView() : null;
  if (early) early.catch(() => {}); // awaited below, unless the run itself is at fault
  let content;
  let isLive = false;
  try {
    const run = await refreshRuns();
    isLive = Boolean(run) && run.state === "running" && !EMBEDDED;
    if (run && run.fault && !["evals", "results"].includes(view)) throw new Error(run.fault);
    if (!run && !["evals", "results"].includes(view)) return go("evals", {});
    content = await (early || drawView());
  } catch (error) {
    content = [h("p", { class: "error", role: "alert" }, error.message)];
  }
  if (number !== state.drawn) return; // the user has gone on
  main.replaceChildren(...[content].flat(9).filter(Boolean));
  if (!quietly) window.scrollTo(0, 0);
  main.dataset.ready = view;
  if (isLive && ["now", "seconds"].includes(view)) {
    state.timer = setTimeout(() => (document.hidden ? draw : () => draw(true))(), REFRESH_MS);
  }
}

// Now

async function drawNow(run) {
  const view = await get(run + "now");
  const { summary } = view;
  const share = summary.total_steps ? Math.min(1, summary.num_steps / summary.total_steps) : 0;
  return [
    h("div", { class: "facts" },
      h("b", {}, "step " + summary.num_steps + (summary.total_steps ? " of " + summary.total_steps : "")),
      h("span", { class: "dim" }, "time left " + duration(summary.eta_s)),
      h("span", { class: "dim" }, "newest step " + clock(summary.updated)),
      summary.process && h("span", { class: "dim" }, summary.process)),
    h("div", { class: "progress", role: "progressbar", "aria-valuenow": Math.round(share * 100) },
      h("i", { style: { width: share * 100 + "%" } })),
    view.waits_for && h("p", { class: "dim" }, "Waits for " + view.waits_for + "."),
    view.alarms.map(drawAlarm),
    h("div", { class: "cards" }, view.numbers.map((one) =>
      h("a", { class: "card", href: link("curves", { key: one.key }), style: { color: "inherit", "text-decoration": "none" } },
        h("div", { class: "title" }, one.title), h("div", { class: "value" }, short(one.value)), sparkline(one.spark)))),
    h("h2", {}, "Prompts"),
    h("div", { class: "facts" }, Object.entries(view.prompts).map(([name, count]) =>
      h("a", { href: link("prompts", { state: name }) }, name + " " + count.toLocaleString()))),
    drawMembers(view.members),
    Object.keys(view.servers).length > 0 && [
      h("h2", {}, "All servers, in the newest step"),
      h("div", { class: "facts" }, Object.entries(view.servers).map(([name, value]) => h("span", {}, name.replaceAll("_", " ") + " ", h("b", {}, short(value))))),
    ],
    view.failures.length > 0 && [
      h("h2", {}, "Failures since the process began"),
      simpleTable(["kind", "count"], view.failures.map((one) => [one.kind, short(one.count)])),
    ],
    h("h2", {}, "Events"),
    simpleTable(["time", "kind", ""], view.events.slice().reverse().map((one) => [clock(one.time), one.kind, one.text])),
  ];
}

function drawMembers(members) {
  const chip = (one) => h("span", { class: "chip " + (["serving", "running"].includes(one.state) ? "good" : "bad") }, one.state);
  return [
    h("h2", {}, "Servers and workers"),
    members.why && h("p", { class: "dim" }, "Not known: " + members.why + "."),
    members.servers.length > 0 && simpleTable(["server", "state", "version", "running", "waiting"],
      members.servers.map((one) => [one.name, chip(one), short(one.version), short(one.running), short(one.waiting)])),
    members.workers.length > 0 && simpleTable(["rollout worker", "state", "process", "groups"],
      members.workers.map((one) => [one.name, chip(one), one.pid === null ? "–" : String(one.pid), short(one.groups)])),
  ];
}

function drawAlarm(alarm) {
  return h("div", { class: `card alarm alarm-${alarm.level}`, role: "status" },
    h("b", {}, alarm.kind), " ", h("span", {}, alarm.text), h("div", { class: "dim" }, alarm.advice));
}

function simpleTable(head, rows) {
  return h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, head.map((one) => h("th", {}, one)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((one) => h("td", {}, one)))))));
}

function sparkline(values) {
  const known = values.filter((one) => one !== null);
  const low = Math.min(...known), high = Math.max(...known), span = high - low || 1;
  const points = known.map((one, i) => ((i * 200) / Math.max(1, known.length - 1)).toFixed(1) + "," + (30 - ((one - low) / span) * 26).toFixed(1));
  return s("svg", { viewBox: "0 0 200 34", preserveAspectRatio: "none", "aria-hidden": "true" },
    s("polyline", { points: points.join(" "), fill: "none", stroke: "var(--accent)", "stroke-width": 1.6, "vector-effect": "non-scaling-stroke" }));
}

// Where the second went

async function drawSeconds(run, params) {
  const last = params.last || "50";
  const found = await get(run + "seconds", last === "50" ? {} : { last });
  if (!found) return h("p", { class: "dim" }, "No step has ended yet.");
  const choice = h("select", { "aria-label": "steps", onchange: (event) => go("seconds", { last: event.target.value }) },
    ["10", "50", "200", "1000"].map((one) => h("option", { value: one, selected: one === last }, "last " + one + " steps")));
  return [
    h("div", { class: "bar" }, h("b", {}, "Steps " + found.first_step + " to " + found.last_step), !EMBEDDED && choice),
    h("div", { id: "verdict" }, found.verdicts.map((one) => h("p", {}, one))),
    drawShares("Trainer", "time of the controller's loop", found.trainer),
    found.servers.length ? drawShares("Servers", "seconds of all inference servers", found.servers)
      : [h("h2", {}, "Servers"), h("p", { class: "dim" }, "Not measured yet: it takes two steps with the same servers.")],
    found.rollout.length > 0 && drawShares("Rollout", "lives of the prompts of these steps, together", found.rollout),
  ];
}

function drawShares(title, what, shares) {
  const colour = (i) => "var(--c" + (i % 6) + ")";
  return [
    h("h2", {}, title, h("span", { class: "dim" }, " · " + what)),
    h("div", { class: "stack", role: "img", "aria-label": shares.map((one) => one.cause + " " + percent(one.share)).join(", ") },
      shares.map((one, i) => h("i", { title: one.cause + " " + percent(one.share), style: { width: one.share * 100 + "%", background: colour(i) } }))),
    h("div", { class: "scroll" }, h("table", { class: "shares" }, h("tbody", {}, shares.map((one, i) => h("tr", {},
      h("td", {}, h("span", { class: "swatch", style: { background: colour(i) } }), one.cause, one.is_loss && h("span", { class: "dim" }, " (loss)")),
      h("td", { class: "number" }, percent(one.share)), h("td", { class: "number" }, one.seconds.toFixed(1) + " s"),
      h("td", { class: "dim wide" }, one.is_loss && one.share >= 0.02 ? one.advice : "")))))),
  ];
}

// Samples

const FILTERS = [
  ["text", "text", "search"], ["min_reward", "reward ≥", "number"], ["max_reward", "reward ≤", "number"],
  ["min_length", "tokens ≥", "number"], ["max_length", "tokens ≤", "number"], ["min_step", "step ≥", "number"], ["max_step", "step ≤", "number"],
];

async function drawSamples(run, params) {
  const wanted = Object.fromEntries(FILTERS.map(([name]) => [name, params[name] || ""]));
  wanted.state = params.state || "";
  wanted.offset = params.offset || "";
  const found = await get(run + "samples", wanted);
  const form = h("form", { class: "filter", onsubmit: (event) => {
    event.preventDefault();
    go("samples", Object.fromEntries([...new FormData(form)].filter(([, one]) => one !== "")));
  } },
    FILTERS.map(([name, title, type]) => h("label", {}, title, h("input", { name, type, step: "any", value: wanted[name] }))),
    h("label", {}, "state", h("select", { name: "state", onchange: () => form.requestSubmit() },
      [["", "trained"], ["finished", "waiting for training"]].map(([value, title]) => h("option", { value, selected: value === wanted.state }, title)))),
    h("button", { type: "submit" }, "Filter"), h("a", { href: link("samples", {}) }, "all"));
  const next = Number(wanted.offset) + found.limit;
  return [
    form,
    found.samples.length ? sampleTable(found.samples) : h("p", { class: "dim" },
      found.stored ? "No stored sample matches." : "No samples are stored: a run keeps the first group of its steps as it trains."),
    h("div", { class: "bar" }, h("span", { class: "dim" }, found.stored.toLocaleString() + " samples are stored"),
      found.samples.length >= found.limit && !EMBEDDED && h("a", { href: link("samples", { ...wanted, offset: next }) }, "older ones")),
  ];
}

function sampleTable(samples) {
  return h("div", { class: "scroll" }, h("table", { class: "samples" },
    h("thead", {}, h("tr", {}, h("th", { class: "number" }, "step"), h("th", { class: "number" }, "prompt"), h("th", { class: "number" }, "reward"), h("th", { class: "number wide" }, "tokens"), h("th", {}, "prompt, output"))),
    h("tbody", {}, samples.map((one) => h("tr", { class: "row", onclick: () => go("sample", { task: one.task_id, sample: one.sample }) },
      h("td", { class: "number" }, one.step === null ? "–" : one.step),
      h("td", { class: "number" }, one.task_id + "/" + one.sample),
      h("td", { class: "number" }, rewardChip(one.reward)),
      h("td", { class: "number wide" }, one.length, one.is_cut ? " ✂" : ""),
      h("td", { class: "text" }, h("div", { class: "clip dim" }, one.prompt), h("div", { class: "clip" }, one.output)))))));
}

function rewardChip(reward) {
  return h("span", { class: "chip" + (reward > 0 ? " good" : reward === null ? "" : " bad") }, short(reward));
}

// One sample: tokens and dialogue

const COLOURS = ["logprob", "ratio", "advantage", "entropy", "version", "mask"];

async function drawSample(run, params) {
  const found = await get(run + "sample/" + params.task + "/" + params.sample);
  const colours = COLOURS.filter((name) => found[name]);
  if (!colours.includes(state.colour)) state.colour = colours[0];
  const strip = h("div", { class: "strip card", id: "strip" });
  const legend = h("span", { class: "dim", id: "legend" });
  const detail = h("div", { class: "dim text", id: "detail" }, "Point at a token.");
  let shown = MAX_SPANS;
  const paint = () => {
    strip.replaceChildren(...spans(found, shown, detail));
    if (found.tokens.length > shown) {
      strip.append(h("button", { type: "button", onclick: () => { shown = found.tokens.length; paint(); } }, "all " + found.tokens.length.toLocaleString() + " tokens"));
    }
    legend.textContent = LEGENDS[state.colour] || "";
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.colour === state.colour));
  };
  const buttons = colours.map((name) => h("button", { type: "button", "data-colour": name, onclick: () => { state.colour = name; paint(); } }, name));
  main.nextColour = () => { state.colour = colours[(colours.indexOf(state.colour) + 1) % colours.length]; paint(); };
  if (found.tokens.length) paint();
  return [
    h("div", { class: "facts" },
      h("b", {}, "prompt ", h("a", { href: link("prompt", { task: found.task_id }) }, String(found.task_id)), ", sample " + found.sample),
      found.reward !== undefined && h("span", {}, "reward ", rewardChip(found.reward)),
      found.length !== undefined && h("span", {}, found.length + " tokens trained on" + (found.is_cut ? ", cut off" : "")),
      found.step !== null && found.step !== undefined && h("span", {}, "step " + found.step)),
    found.tokens.length > 0 && [
      h("div", { class: "bar" }, h("span", { class: "dim" }, "colour"), buttons, legend),
      found.missing && h("p", { class: "dim", id: "missing" }, found.missing[0].toUpperCase() + found.missing.slice(1) + "."),
      detail, strip,
      h("p", { class: "dim" }, "Grey: the prompt. Dotted: read by the model, not written by it (tools, users).")],
    found.turns.length > 0 && [h("h2", {}, "Dialogue"), drawTree(found.turns, null)],
  ];
}

const LEGENDS = {
  logprob: "the stronger, the less probable when it was sampled (full at −5)",
  ratio: "training policy / sampling policy: blue below 1, red above (full at ½ and 2)",
  advantage: "blue: made more likely, red: less",
  entropy: "the stronger, the less certain the training policy was there (full at 2 nats)",
  version: "the stronger, the older the weights that sampled it",
  mask: "green: trained on",
};

function spans(found, count, detail) {
  const first = found.mask.indexOf(true);
  const scale = Math.max(1e-9, ...(found.advantage || []).map((one) => Math.abs(one || 0)));
  const newest = Math.max(...(found.version || [0]));
  const oldest = Math.min(...(found.version || [0]).filter((one) => one >= 0), newest);
  return found.tokens.slice(0, count).map((text, i) => {
    const isTrained = found.mask[i];
    const kind = isTrained ? "" : first < 0 || i < first ? "prompt" : "tool";
    const background = isTrained ? tint(state.colour, found, i, scale, newest, oldest) : "";
    const shown = text.replaceAll("\n", "↵\n") || "∅";
    return h("span", { class: kind, style: background ? { background } : {}, onmouseenter: () => { detail.textContent = describe(found, i); } }, shown);
  });
}

function tint(name, found, i, scale, newest, oldest) {
  const value = found[name] ? found[name][i] : null;
  if (value === null) return "";
  const shade = (colour, share) => "rgba(var(--" + colour + ")," + (0.75 * Math.min(1, share)).toFixed(3) + ")";
  if (name === "logprob") return shade("hot", -value / 5);
  if (name === "ratio") return shade(value < 1 ? "pos" : "neg", Math.abs(Math.log(Math.max(value, 1e-9))) / Math.LN2);
  if (name === "advantage") return shade(value > 0 ? "pos" : "neg", Math.abs(value) / scale);
  if (name === "entropy") return shade("age", value / 2);
  if (name === "version") return shade("age", 0.15 + (0.85 * (newest - value)) / Math.max(1, newest - oldest));
  return shade("yes", value ? 0.4 : 0);
}

function describe(found, i) {
  const values = ["logprob", "prox_logp", "train_logp", "ref_logp", "ratio", "advantage", "entropy", "version"].filter((name) => found[name] && found.mask[i]).map((name) => name + " " + short(found[name][i]));
  return ["token " + i, "id " + found.ids[i], ...values, JSON.stringify(found.tokens[i])].join("  ·  ");
}

function drawTree(turns, parent) {
  const children = turns.filter((turn) => turn.parent === parent);
  return children.length > 0 && h("ul", { class: "tree" }, children.map((turn) => h("li", {},
    turn.messages.map((one) => drawMessage(one)), drawMessage(turn.reply),
    h("div", { class: "dim" }, turn.num_tokens + " tokens, " + turn.stop_reason + (turn.reward === null ? "" : ", reward " + short(turn.reward))),
    drawTree(turns, turn.id))));
}

function drawMessage(message) {
  const content = typeof message.content === "string" ? message.content : message.content ? JSON.stringify(message.content) : "";
  const calls = message.tool_calls ? JSON.stringify(message.tool_calls, null, 1) : "";
  return h("div", { class: "message text" }, h("b", {}, message.role), content, calls && h("div", { class: "dim" }, calls));
}

// Prompts

async function drawPrompts(run, params) {
  const states = ["issued", "finished", "trained", "rejected", "stale", "failed"];
  const wanted = { state: params.state || "", step: params.step || "", before: params.before || "" };
  const rows = await get(run + "prompts", wanted);
  const form = h("form", { class: "filter", onsubmit: (event) => {
    event.preventDefault();
    const given = Object.fromEntries([...new FormData(form)].filter(([, one]) => one !== ""));
    if (given.task) go("prompt", { task: given.task });
    else go("prompts", given);
  } },
    h("label", {}, "state", h("select", { name: "state", onchange: () => form.requestSubmit() }, ["", ...states].map((one) => h("option", { value: one, selected: one === wanted.state }, one || "any")))),
    h("label", {}, "trained in step", h("input", { name: "step", type: "number", min: 0, value: wanted.step })),
    h("label", {}, "prompt number", h("input", { name: "task", type: "number", min: 0 })),
    h("button", { type: "submit" }, "Show"));
  return [
    form,
    h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, ["prompt", "state", "reward", "step", "versions", "issued", "why"].map((one) => h("th", {}, one)))),
      h("tbody", {}, rows.map((one) => h("tr", { class: "row", onclick: () => go("prompt", { task: one.task_id }) },
        h("td", {}, one.task_id), h("td", {}, h("span", { class: "chip " + one.state }, one.state)), h("td", {}, short(one.reward)),
        h("td", {}, one.step === null ? "–" : one.step),
        h("td", {}, one.head_version === null ? "–" : one.head_version + " … " + one.tail_version),
        h("td", {}, clock(one.issued_at)), h("td", { class: "dim" }, one.why)))))),
    rows.length === 0 && h("p", { class: "dim" }, "No prompt matches."),
    rows.length >= 50 && !EMBEDDED && h("a", { href: link("prompts", { ...wanted, before: rows[rows.length - 1].task_id }) }, "older ones"),
  ];
}

async function drawPrompt(run, params) {
  const found = await get(run + "prompt/" + params.task);
  const first = found.samples[0];
  return [
    h("div", { class: "facts" }, h("b", {}, "Prompt " + found.task.task_id), h("span", { class: "chip " + found.task.state }, found.task.state)),
    h("ol", { class: "story" }, found.story.map((one) => h("li", {}, h("span", { class: "dim" }, clock(one.time) + "  "), one.text))),
    first ? [h("h2", {}, "Its group, side by side"), h("div", { class: "card text message" }, first.prompt),
      h("div", { class: "charts group", style: { "margin-top": "12px" } }, found.samples.map((one) =>
        h("a", { class: "card", href: link("sample", { task: one.task_id, sample: one.sample }), style: { color: "inherit", "text-decoration": "none" } },
          h("div", { class: "facts" }, h("b", {}, "sample " + one.sample), rewardChip(one.reward), h("span", { class: "dim" }, one.length + " tokens" + (one.is_cut ? ", cut off" : ""))),
          h("div", { class: "text message" }, one.output))))]
      : h("p", { class: "dim" }, "None of its samples is stored: a run keeps the first group of its steps."),
  ];
}

// Curves

async function drawCurves(run, params) {
  const chosen = new Set((params.runs || String(currentRun())).split(",").map(Number));
  const over = params.over || "step";
  const smooth = Number(params.smooth || 1);
  const filter = params.filter || "";
  const shown = state.runs.filter((one) => chosen.has(one.id) && !one.fault);
  const replies = await Promise.all(shown.map((one) => get("run/" + one.id + "/curves")));
  const names = [...new Set(replies.flatMap((one) => Object.keys(one.values)))].sort();
  const usual = ["rollout/reward", "eval/reward", "actor/loss", "loss", "actor/entropy/avg", "rollout/staleness", "tokens_per_second", "rollout/output_len", "rollout/no_eos"];
  let picked = filter ? names.filter((name) => name.includes(filter)) : usual.filter((name) => names.includes(name));
  if (params.key && names.includes(params.key)) picked = [params.key, ...picked.filter((name) => name !== params.key)];
  const again = (more) => go("curves", { ...params, ...more });
  return [
    h("form", { class: "filter", onsubmit: (event) => { event.preventDefault(); again({ filter: event.target.elements.filter.value, key: "" }); } },
      h("label", {}, "statistics with", h("input", { name: "filter", type: "search", value: filter, placeholder: "such as kl" })),
      h("label", {}, "over", h("select", { onchange: (event) => again({ over: event.target.value }) }, ["step", "tokens", "hours"].map((one) => h("option", { value: one, selected: one === over }, one)))),
      h("label", {}, "mean of", h("select", { onchange: (event) => again({ smooth: event.target.value }) }, [1, 5, 20].map((one) => h("option", { value: one, selected: one === smooth }, one + (one === 1 ? " point" : " points"))))),
      state.runs.length > 1 && state.runs.filter((one) => !one.fault).map((one) => h("label", { class: "inline" },
        h("input", { type: "checkbox", checked: chosen.has(one.id), onchange: (event) => {
          if (event.target.checked) chosen.add(one.id); else chosen.delete(one.id);
          again({ runs: [...chosen].join(",") });
        } }), h("span", { class: "swatch", style: { background: "var(--c" + (one.id % 6) + ")" } }), one.name))),
    h("div", { class: "charts" }, picked.slice(0, 12).map((name) => h("div", { class: "card" },
      h("div", { class: "title" }, name),
      lineChart(shown.map((one, i) => ({ name: one.name, colour: "var(--c" + (one.id % 6) + ")", points: pointsOf(replies[i], name, over, smooth) })), over)))),
    picked.length === 0 && h("p", { class: "dim" }, "No statistic matches."),
    picked.length > 12 && h("p", { class: "dim" }, picked.length - 12 + " more match: filter closer."),
  ];
}

function pointsOf(reply, name, over, smooth) {
  const values = reply.values[name] || [];
  const points = reply.axes[over].map((x, i) => [x, values[i]]).filter(([, y]) => y !== null && y !== undefined);
  return points.map(([x], i) => {
    const window = points.slice(Math.max(0, i - smooth + 1), i + 1);
    return [x, window.reduce((sum, [, y]) => sum + y, 0) / window.length];
  });
}

function lineChart(series, xName) {
  const width = 420, height = 200, left = 46, right = 10, top = 8, bottom = 24;
  const all = series.flatMap((one) => one.points);
  if (!all.length) return h("p", { class: "dim" }, "nothing recorded");
  const xs = all.map(([x]) => x), ys = all.map(([, y]) => y);
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  let [y0, y1] = [Math.min(...ys), Math.max(...ys)];
  if (y0 === y1) { y0 -= 0.5; y1 += 0.5; }
  const px = (x) => left + ((x - x0) / (x1 - x0 || 1)) * (width - left - right);
  const py = (y) => top + (1 - (y - y0) / (y1 - y0)) * (height - top - bottom);
  const tip = h("div", { class: "tip" }, series.map((one) => (one.points.length ? short(one.points[one.points.length - 1][1]) : "–")).join("  ·  "));
  const cross = s("line", { class: "cross", y1: top, y2: height - bottom, x1: -9, x2: -9 });
  const ticks = [0, 1, 2, 3].map((i) => y0 + ((y1 - y0) * i) / 3);
  const svg = s("svg", { viewBox: "0 0 " + width + " " + height, role: "img" },
    ticks.map((y) => [s("line", { class: "grid", x1: left, x2: width - right, y1: py(y), y2: py(y) }), s("text", { x: left - 6, y: py(y) + 4, "text-anchor": "end" }, short(Number(y.toPrecision(3))))]),
    s("text", { x: left, y: height - 6 }, short(Number(x0.toPrecision(3)))),
    s("text", { x: width - right, y: height - 6, "text-anchor": "end" }, short(Number(x1.toPrecision(3))) + " " + xName),
    series.map((one) => one.points.length === 1
      ? s("circle", { cx: px(one.points[0][0]), cy: py(one.points[0][1]), r: 3, fill: one.colour })
      : s("polyline", { fill: "none", stroke: one.colour, "stroke-width": 1.7, points: one.points.map(([x, y]) => px(x).toFixed(1) + "," + py(y).toFixed(1)).join(" ") })),
    cross);
  svg.addEventListener("mousemove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = x0 + (((event.clientX - box.left) / box.width) * width - left) / (width - left - right) * (x1 - x0);
    const near = series.map((one) => one.points.reduce((best, point) => (best && Math.abs(best[0] - x) <= Math.abs(point[0] - x) ? best : point), null));
    const first = near.find(Boolean);
    cross.setAttribute("x1", px(first[0]));
    cross.setAttribute("x2", px(first[0]));
    tip.textContent = xName + " " + short(first[0]) + ":  " + near.map((point, i) => (series.length > 1 ? series[i].name + " " : "") + (point ? short(point[1]) : "–")).join("  ·  ");
  });
  return h("div", { class: "chart" }, svg, tip);
}

// Config

async function drawConfig(run, params) {
  const other = params.other || "";
  const rest = state.runs.filter((one) => one.id !== currentRun() && !one.fault);
  const choice = h("label", {}, "compare with", h("select", { onchange: (event) => go("config", { other: event.target.value }) },
    [h("option", { value: "" }, "nothing"), ...rest.map((one) => h("option", { value: one.id, selected: String(one.id) === other }, one.name))]));
  if (other !== "") {
    const rows = await get("diff", { first: currentRun(), second: other });
    const names = [currentRun(), Number(other)].map((id) => state.runs.find((one) => one.id === id).name);
    return [h("div", { class: "bar" }, choice, h("b", {}, rows.length + " keys differ")), simpleTable(["key", ...names], rows.map((one) => [one.key, one.first, one.second]))];
  }
  const config = await get(run + "config");
  const body = h("tbody", {});
  const list = (text) => body.replaceChildren(...Object.entries(config).filter(([key]) => key.includes(text)).map(([key, value]) => h("tr", {}, h("td", {}, key), h("td", { class: "text" }, value))));
  list("");
  return [
    h("div", { class: "filter bar" }, choice, h("label", {}, "keys with", h("input", { type: "search", name: "filter", oninput: (event) => list(event.target.value) }))),
    h("div", { class: "scroll" }, h("table", {}, body)),
  ];
}

// Evaluations

async function drawEvals() {
  const files = await get("evals");
  if (!files.length) return h("p", { class: "dim" }, "No eval.db of areal eval is here: give its file to areal dash, too.");
  return files.map((file) => [
    h("h2", {}, file.file),
    file.fault ? h("p", { class: "error" }, file.fault) : h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, ["target", "suite", "step", "problems", "samples", "mean reward", "not scored", "begun"].map((one) => h("th", {}, one)))),
      h("tbody", {}, file.evaluations.map((one) => h("tr", { class: "row", onclick: () => go("results", { file: file.id, evaluation: one.id }) },
        h("td", {}, one.target), h("td", {}, one.suite), h("td", {}, one.step === null ? "–" : one.step), h("td", {}, one.problems), h("td", {}, one.samples),
        h("td", {}, short(one.reward)), h("td", { class: "dim" }, Object.entries(one.counts).filter(([name]) => name !== "scored").map(([name, count]) => name + " " + count).join(", ")),
        h("td", {}, clock(one.time))))))),
  ]);
}

const RESULT_FILTERS = [["text", "text", "search"], ["min_reward", "reward ≥", "number"], ["max_reward", "reward ≤", "number"]];

async function drawResults(run, params) {
  const wanted = { evaluation: params.evaluation, state: params.state || "", offset: params.offset || "" };
  for (const [name] of RESULT_FILTERS) wanted[name] = params[name] || "";
  const found = await get("eval/" + params.file + "/results", wanted);
  const back = { file: params.file, evaluation: params.evaluation };
  const form = h("form", { class: "filter", onsubmit: (event) => {
    event.preventDefault();
    go("results", { ...back, ...Object.fromEntries([...new FormData(form)].filter(([, one]) => one !== "")) });
  } },
    RESULT_FILTERS.map(([name, title, type]) => h("label", {}, title, h("input", { name, type, step: "any", value: wanted[name] }))),
    h("label", {}, "state", h("select", { name: "state", onchange: () => form.requestSubmit() },
      ["", "scored", "truncated", "rejected", "failed"].map((one) => h("option", { value: one, selected: one === wanted.state }, one || "any")))),
    h("button", { type: "submit" }, "Filter"), h("a", { href: link("results", back) }, "all"));
  return [
    !EMBEDDED && form,
    found.results.length === 0 && h("p", { class: "dim" }, "No sample matches."),
    h("div", { class: "scroll" }, h("table", { class: "samples" },
      h("thead", {}, h("tr", {}, h("th", { class: "number" }, "problem"), h("th", {}, "state"), h("th", { class: "number" }, "reward"), h("th", { class: "number wide" }, "tokens"), h("th", {}, "problem, completion"))),
      h("tbody", {}, found.results.map((one) => h("tr", {},
        h("td", { class: "number" }, one.row + "/" + one.sample), h("td", {}, one.state), h("td", { class: "number" }, rewardChip(one.reward)),
        h("td", { class: "number wide" }, one.num_tokens),
        h("td", { class: "text" }, h("div", { class: "dim" }, one.problem), h("div", {}, one.completion || one.why))))))),
    found.results.length >= found.limit && !EMBEDDED && h("a", { href: link("results", { ...back, ...wanted, offset: Number(wanted.offset) + found.limit }) }, "more"),
  ];
}

const DRAW = {
  now: drawNow, seconds: drawSeconds, samples: drawSamples, sample: drawSample,
  prompts: drawPrompts, prompt: drawPrompt, curves: drawCurves, config: drawConfig,
  evals: drawEvals, results: drawResults,
};

// Keyboard, theme

function moveRow(by) {
  const rows = [...main.querySelectorAll("tr.row")];
  if (!rows.length) return;
  const now = rows.findIndex((row) => row.classList.contains("chosen"));
  const next = rows[Math.max(0, Math.min(rows.length - 1, now + by))];
  rows.forEach((row) => row.classList.toggle("chosen", row === next));
  next.scrollIntoView({ block: "nearest" });
}

function nextRun() {
  const ids = state.runs.map((run) => run.id);
  location.hash = "#" + place().view.replace(/^(sample|prompt)$/, "$1s") + "?run=" + ids[(ids.indexOf(currentRun()) + 1) % ids.length];
}

function switchTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  try { localStorage.setItem("areal-theme", root.dataset.theme); } catch { /* a file may have no storage */ }
}

function help() {
  const dialog = document.getElementById("help");
  dialog.replaceChildren(h("table", {}, h("tbody", {}, KEYS.map(([key, what]) => h("tr", {}, h("td", {}, h("kbd", {}, key)), h("td", {}, what))))),
    h("button", { type: "button", onclick: () => dialog.close() }, "close"));
  dialog.showModal();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const chosen = main.querySelector("tr.chosen");
  const acts = {
    j: () => moveRow(1), k: () => moveRow(-1), r: nextRun, t: switchTheme, "?": help,
    c: () => main.nextColour && place().view === "sample" && main.nextColour(),
    Escape: () => history.back(),
    Enter: () => chosen && chosen.click(),
    "/": () => { const field = main.querySelector("input[type=search]"); if (field) { field.focus(); event.preventDefault(); } },
  };
  const view = VIEWS[Number(event.key) - 1];
  if (view) go(view[0], {});
  else if (acts[event.key] && !document.getElementById("help").open) acts[event.key]();
});
document.getElementById("run").addEventListener("change", (event) => {
  location.hash = "#" + place().view.replace(/^(sample|prompt)$/, "$1s") + "?run=" + event.target.value;
});
document.getElementById("theme").addEventListener("click", switchTheme);
document.getElementById("keys").addEventListener("click", help);
window.addEventListener("hashchange", () => draw());
try {
  const theme = localStorage.getItem("areal-theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch { /* a file may have no storage */ }
draw();
