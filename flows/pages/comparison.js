// The page of a comparison: variants by figures, differences, and curves by what was spent.

const variants = data.rows.map((row) => row.variant);
const colour = (variant) => COLOURS[variants.indexOf(variant) % COLOURS.length];
const MEASURES = [["success", "success"], ["entropy", "entropy"], ["gradient_norm", "gradient norm"], ["episode_steps", "steps of an episode"]];

function success(row) {
  return { mean: row.success, low: row.low, high: row.high };
}

function showTables() {
  const count = (value) => (value === undefined ? "" : Math.round(value).toLocaleString("en"));
  const graded = data.rows.some((row) => row.score);
  find("results").append(
    table(
      "Success with 95 % intervals over seeds and questions, and what training spent (means over seeds)",
      ["variant", "success (%)", "by seed (%)", ...(graded ? ["score (%)"] : []), "iterations", "sampled tokens", "tool calls", "trained tokens", "minutes"],
      data.rows.map((row) => [
        row.variant,
        interval(success(row), 100),
        Object.values(row.by_seed).map((value) => (100 * value).toFixed(1)).join(", "),
        ...(graded ? [interval(row.score, 100)] : []),
        round(row.iterations),
        count(row.sampled_tokens),
        count(row.tool_calls),
        count(row.trained_tokens),
        row.seconds === undefined ? "" : round(row.seconds / 60, 2),
      ]),
    ),
  );
  const kinds = Object.keys(data.kinds[0].kinds);
  if (kinds.length > 1) {
    const rows = data.kinds.map((row) => [row.variant, ...kinds.map((kind) => interval(success(row.kinds[kind]), 100))]);
    find("results").append(table("Success by kind of question (%)", ["variant", ...kinds], rows));
  }
  if (data.differences.length) {
    const against = data.differences[0].baseline;
    const needed = (row) => (row.told ? "told" : [row.seeds_needed && `${row.seeds_needed} seeds`, row.questions_needed && `${row.questions_needed} questions`].filter(Boolean).join(" or "));
    find("results").append(
      table(
        `Differences in success from ${against}, paired by seed and question, with 95 % intervals. Finds: the smallest true difference found with probability 80 %. To tell it: how many would find the observed one.`,
        ["variant", `less ${against} (points)`, "finds (points)", "to tell it"],
        data.differences.map((row) => [row.variant, interval(row, 100), row.finds === undefined ? "" : (100 * row.finds).toFixed(1), needed(row)]),
      ),
    );
  }
  find("verdict").textContent = data.panel;
  find("facts").textContent = `comparison of ${variants.length} variants`;
}

async function showIntervals() {
  const rows = [...data.rows].reverse();
  const names = rows.map((row) => row.variant);
  const differences = Object.fromEntries(data.differences.map((row) => [row.variant, row]));
  const traces = [withIntervals(names, (name) => success(rows[names.indexOf(name)]), "success", COLOURS[0], 100)];
  const layout = { height: 60 + 34 * names.length, showlegend: false, yaxis: { automargin: true }, xaxis: { title: { text: "success (%)" } } };
  if (data.differences.length) {
    traces.push({ ...withIntervals(names, (name) => differences[name] || null, "difference", COLOURS[1], 100), ...axes(1) });
    layout.grid = { rows: 1, columns: 2, pattern: "independent" };
    layout.xaxis2 = { title: { text: `less ${label(data.differences[0].baseline)} (points)` }, zeroline: true };
    layout.yaxis2 = { showticklabels: false };
  }
  await draw("intervals", traces, layout);
}

async function showCurves() {
  const spent = find("spent").value;
  const shown = MEASURES.filter(([name]) => Object.values(data.curves).every((seeds) => seeds.every((curve) => curve[name])));
  const traces = [];
  shown.forEach(([name], i) => {
    for (const [variant, seeds] of Object.entries(data.curves)) {
      seeds.forEach((curve, seed) => {
        traces.push({
          ...{ type: "scatter", mode: "lines", x: curve[spent], y: curve[name], name: label(variant), legendgroup: label(variant) },
          ...{ showlegend: !i && !seed, line: { color: colour(variant), width: 1.2 }, opacity: 0.75, ...axes(i) },
        });
      });
    }
  });
  await draw("curves", traces, { ...panels(shown.map(([, title]) => title), spent.replace(/_/g, " ")), height: 300, legend: { orientation: "h", y: -0.3 } });
}

showTables();
const choice = element("select", { id: "spent", onchange: showCurves }, ...data.spent.map((kind) => element("option", { value: kind, selected: kind === data.budget }, kind.replace(/_/g, " "))));
find("axes").append(element("label", {}, "against ", choice));
showIntervals().then(showCurves);
