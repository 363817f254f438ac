// The page of a run: results and curves. The trees are in tree.js.

const MOST_CURVES = [
  ["reward", "reward"],
  ["success", "success"],
  ["entropy", "entropy / ln |V|"],
  ["kl", "KL from the sampling policy"],
  ["gradient_norm", "gradient norm"],
  ["clip_fraction", "share of clipped tokens"],
  ["response_tokens", "tokens of a response"],
  ["tool_calls_a_leaf", "tool calls a leaf"],
  ["groups_without_spread", "share of groups without spread"],
  ["masked_share", "share of leaves left out"],
  ["refused", "refused acts, and by reason (dotted)"],
];

function showResults() {
  const links = data.links.run ? [" · ", element("a", { href: data.links.run, rel: "noreferrer" }, "the run in MLflow")] : [];
  find("facts").append(...[...data.about, data.policy_check].filter(Boolean).flatMap((line, i) => [i ? element("br", {}) : "", visible(line)]), ...links);
  if (!data.finished) find("live").textContent = `Training goes on: ${trained().length} iterations so far. This file is written anew at each validation; reload it then.`;
  find("changed").textContent = visible(data.recipe_changed.join("\n") || "no value");
  find("recipe").textContent = visible(data.recipe_text);
  if (!data.results.length) {
    find("results").append(element("p", {}, "This run has no evaluation yet."));
    return;
  }
  const agents = Object.keys(data.results[0].agents);
  const scale = (row) => (row.unit === "%" ? 100 : 1);
  const head = data.results.filter((row) => !row.measure.includes(", ") || row.measure.startsWith("success"));
  find("results").append(
    table(
      "Held-out questions, with 95 % bootstrap intervals",
      ["", ...agents],
      head.map((row) => [row.unit ? `${row.measure} (${row.unit})` : row.measure, ...agents.map((agent) => interval(row.agents[agent], scale(row)))]),
    ),
  );
  if (data.differences.length) {
    const p = (value) => (value === undefined ? "" : value < 0.001 ? "< 0.001" : value.toFixed(3));
    find("results").append(
      table(
        "Trained, paired by question",
        ["", "points", "p", "p for all sets (Holm)"],
        data.differences.map((row) => [`${row.measure}, less ${row.agent}`, interval(row, 100), p(row.p), p(row.p_holm)]),
      ),
    );
  }
  find("verdict").textContent = [data.verdict && `Verdict: ${data.verdict}.`, data.panel].filter(Boolean).join(" ");
}

// Return the iterations of training; the evaluation is listed with them.
const trained = () => data.iterations.filter((one) => one.number !== "evaluation");

// Link a question of the evaluation that got better or worse, one of each.
function showChanged() {
  const links = ["worse", "better"].flatMap((change) => {
    const ids = data.changed[change] ?? [];
    if (!ids.length) return [];
    const place = new URLSearchParams({ iteration: "evaluation", question: ids[0], leaf: 0 });
    return [element("a", { href: `#${place}` }, `${ids.length} ${ids.length === 1 ? "question" : "questions"} got ${change}`), " "];
  });
  if (!links.length) return;
  const what = data.kind === "runs" ? `From ${data.runs[1].title} to ${data.runs[0].title}: ` : "Before and after, side by side: ";
  find("changes").append(visible(what), ...links);
}

// Show what the run before had otherwise.
function showBefore() {
  const { before } = data;
  if (!before) return;
  const now = data.results.find((row) => row.measure === "success")?.agents.trained;
  const was = before.success ? `; success ${interval(before.success, 100)} %${now ? `, now ${interval(now, 100)} %` : ""}` : "";
  find("before").append(
    element("p", {}, `Since the run before (${before.name}${was}):`),
    element("pre", {}, before.changes.join("\n") || "no value of the recipe differs"),
  );
}

function showAlarms() {
  const whose = (title) => (data.runs.length > 1 ? `${title}: ` : "");
  const items = data.runs.flatMap(({ title, alarms }) => alarms.map((one) => element("li", {}, `${whose(title)}alarm ${one.name} in iteration ${one.iteration}: ${one.message}`)));
  if (items.length) find("alarms").append(element("ul", {}, ...items));
}

// Mark the iterations of alarms in each of the plots.
function markAlarms(layout, count) {
  for (const { name, iteration } of data.runs.flatMap(({ alarms }) => alarms)) {
    for (let i = 0; i < count; i++) {
      const place = { xref: `x${i ? i + 1 : ""}`, yref: `y${i ? i + 1 : ""} domain`, x: iteration };
      (layout.shapes ??= []).push({ type: "line", ...place, x0: iteration, x1: iteration, y0: 0, y1: 1, line: { color: shade("alarm"), dash: "dash", width: 1 } });
      layout.annotations.push({ ...place, y: 0, text: name, textangle: -90, xanchor: "right", yanchor: "bottom", showarrow: false, font: { size: 9, color: shade("alarm") } });
    }
  }
}

// Show what the entropy does after tool results: the sentence that matters most, and all of it.
function showRises() {
  const rises = Object.fromEntries(data.rises);
  const of = (label) => round(rises[label][0], 4).replace("-", "−");
  const cell = ([mean, ...bounds]) => (mean === undefined ? "" : round(mean, 4).replace("-", "−") + (bounds.length ? ` [${bounds.map((one) => round(one, 4)).join(", ")}]` : ""));
  if (!data.rises.length) return;
  const found = cell(rises["AUC of the rise dH"]);
  const line =
    `Entropy after tool results: dH ${of("dH, percentile 5")} to ${of("dH, percentile 95")}, P ${of("P, percentile 5")} to ${of("P, percentile 95")} ` +
    `(5 to 95 % of the results)${found ? `; AUC of dH for rewards that differ ${found}` : ""}`;
  const rows = data.rises.map(([name, values]) => [name, cell(values)]);
  find("rises").append(element("details", {}, element("summary", {}, line), table("Entropies are divided by ln |V|; intervals: 95 % bootstrap over trees", ["", data.recipe], rows)));
}

async function showIntervals() {
  const rows = data.results.filter((row) => row.measure.startsWith("success")).reverse();
  if (!rows.length) return;
  const names = rows.map((row) => row.measure);
  const traces = Object.keys(rows[0].agents).map((agent, i) =>
    withIntervals(names, (name) => rows[names.indexOf(name)].agents[agent] || null, label(agent), COLOURS[1 - (i % 2)], 100),
  );
  await draw("intervals", traces, {
    ...{ height: 110 + 36 * names.length, xaxis: { title: { text: "success (%)" }, rangemode: "nonnegative" }, yaxis: { automargin: true, ticksuffix: "  " } },
    ...{ legend: { orientation: "h", y: 1.15 }, scattermode: "group", scattergap: 0.6 },
  });
}

// Return a plotly trace of a curve's column.
function lineOf({ curve }, name, title, style, i) {
  return {
    ...{ type: "scatter", mode: "lines+markers", x: curve.iteration, y: curve[name], name: title, connectgaps: true },
    ...{ line: { width: 1.6, ...style }, marker: { size: 4 }, ...axes(i) },
  };
}

// Return a plotly trace of the validation, with its intervals.
function validationOf({ curve }, style, i) {
  const there = curve.iteration.map((_, row) => row).filter((row) => curve.validation_success[row] !== null);
  const at = (name) => there.map((row) => curve[name][row]);
  const middle = at("validation_success");
  return {
    ...{ type: "scatter", mode: "lines+markers", name: "validation", x: at("iteration"), y: middle, ...axes(i), showlegend: false },
    ...{ line: { dash: "dot", ...style }, marker: { size: 6 } },
    error_y: {
      ...{ type: "data", symmetric: false, thickness: 1, ...style },
      array: at("validation_success_high").map((high, row) => high - middle[row]),
      arrayminus: at("validation_success_low").map((low, row) => middle[row] - low),
    },
  };
}

async function showCurves() {
  const runs = data.runs.filter(({ curve }) => curve.iteration);
  const tells = (name) => runs.some(({ curve }) => curve[name] && (name === "success" || curve[name].some((value) => value)));
  const shown = MOST_CURVES.filter(([name]) => tells(name));
  if (!shown.length) return;
  const alone = runs.length === 1;
  const place = shown.findIndex(([name]) => name === "success");
  const validated = runs.filter(({ curve }) => curve.validation_success && place >= 0);
  const traces = runs.flatMap((run, r) =>
    shown.flatMap(([name, title], i) => (run.curve[name] ? [{ ...lineOf(run, name, alone ? title : label(run.title), { color: COLOURS[r] }, i), legendgroup: run.title, showlegend: !i }] : [])),
  );
  traces.push(...validated.map((run) => validationOf(run, { color: COLOURS[alone ? 1 : runs.indexOf(run)] }, place)));
  const refused = alone ? shown.findIndex(([name]) => name === "refused") : -1;
  const reasons = refused < 0 ? [] : Object.keys(runs[0].curve).filter((name) => name.startsWith("refused_"));
  reasons.forEach((name, i) => traces.push(lineOf(runs[0], name, name.replace("refused_", "refused: "), { color: COLOURS[(i + 1) % COLOURS.length], dash: "dot" }, refused)));
  const titles = shown.map(([name, title]) => (name === "success" && validated.length ? "success, and validation (dotted)" : title));
  const layout = panels(titles, "iteration");
  const apart = Math.max(1, Math.ceil(Math.max(...runs.map(({ curve }) => curve.iteration.length)) / 6)); // whole iterations
  shown.forEach((_, i) => Object.assign(layout[`xaxis${i ? i + 1 : ""}`], { tick0: 0, dtick: apart }));
  markAlarms(layout, shown.length);
  await draw("curves", traces, { ...layout, showlegend: !alone, legend: { orientation: "h", y: 1.04, x: 1, xanchor: "right", yanchor: "bottom" }, margin: { ...LAYOUT.margin, t: alone ? 28 : 56 } });
}
