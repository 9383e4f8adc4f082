"use strict";
// Every <details class="figure"> holds its series as JSON; each of its plots is drawn when it comes into view.
(() => {
  const PRINTED_WIDTH = 310;
  const touch = matchMedia("(pointer: coarse)").matches;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const translucent = (colour) => colour + "26";
  let printing = false;

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const ink = () => printing
    ? { text: "#000000", quiet: "#444444", grid: "#dddddd", card: "#ffffff" }
    : { text: style("--text"), quiet: style("--quiet"), grid: style("--grid"), card: style("--card") };

  // A log axis has no place for values of zero or below.
  const onAxes = (series, log) => {
    const kept = series.x.map((x, i) => i).filter((i) =>
      series.x[i] !== null && series.y[i] !== null && !(log === "y" && series.y[i] <= 0) && !(log === "x" && series.x[i] <= 0));
    return Object.fromEntries(["x", "y", "low", "high"].map((key) => [key, series[key].length ? kept.map((i) => series[key][i]) : []]));
  };

  // Where there is no room for names beside the axis they stand beside their points.
  const beside = (panel, x, y) => {
    const all = Object.values(panel.views)[0].flatMap((series) => series.x.map(Math.log));
    const middle = (Math.min(...all) + Math.max(...all)) / 2;
    return { mode: "markers+text", text: y.map((v) => `  ${escaped(panel.names[v])}  `), cliponaxis: false,
      textposition: x.map((v) => (Math.log(v) > middle ? "middle left" : "middle right")) };
  };

  const traces = (panel, axis, hidden, narrow) => panel.views[axis].flatMap((series) => {
    const { x, y, low, high } = onAxes(series, panel.log);
    const shared = { name: escaped(series.name), legendgroup: series.name, visible: !hidden.has(series.name), showlegend: false };
    const drawn = [];
    if (low.length) {
      const bottom = panel.log === "y" ? low.map((v, i) => Math.max(v, panel.floor ?? y[i] / 1000)) : low;
      drawn.push({ ...shared, type: "scatter", mode: "lines", x: [...x, ...x.toReversed()], y: [...high, ...bottom.toReversed()],
        fill: "toself", fillcolor: translucent(series.colour), line: { width: 0 }, hoverinfo: "skip" });
    }
    const line = series.mark === "line" || series.mark === "linked";
    const dots = series.mark !== "line" || x.length === 1;
    const value = panel.names.length
      ? { text: y.map((v) => escaped(panel.names[v])), hovertemplate: "<b>%{text}</b><br>%{x:.4g}<extra></extra>" }
      : { customdata: low.map((v, i) => [v, high[i]]),
          hovertemplate: "<b>%{fullData.name}</b><br>%{y:.5g}" + (low.length ? " (%{customdata[0]:.5g} to %{customdata[1]:.5g})" : "")
            + `<br>${escaped(axis)} %{x:,.6~g}<extra></extra>` };
    drawn.push({ ...shared, ...value, type: "scatter", x, y, mode: line && dots ? "lines+markers" : line ? "lines" : "markers",
      line: { color: series.colour, width: 2 },
      marker: { color: series.colour, size: series.mark === "ring" ? 13 : 7, symbol: series.mark === "ring" ? "circle-open" : "circle" },
      ...(narrow && panel.names.length ? beside(panel, x, y) : {}) });
    return drawn;
  });

  // Dotted lines across what the series span.
  const levels = (panel, axis, hidden) => {
    const x = panel.views[axis].flatMap((series) => series.x);
    const ends = [x.reduce((a, b) => Math.min(a, b), Infinity), x.reduce((a, b) => Math.max(a, b), -Infinity)];
    return panel.levels.map((level) => ({ type: "scatter", mode: "lines", x: ends, y: [level.y, level.y], showlegend: false,
      visible: !hidden.has(level.name), line: { color: level.colour, width: 1.5, dash: "dot" },
      hovertemplate: `<b>${escaped(level.meaning)}</b> %{y:.5g}<br>${escaped(level.name)}<extra></extra>` }));
  };

  // Decades alone are named on a log scale that spans several.
  const decades = (values) => {
    const positive = values.filter((value) => value > 0);
    const span = Math.log10(positive.reduce((a, b) => Math.max(a, b), 1e-300) / positive.reduce((a, b) => Math.min(a, b), 1e300));
    return span > 2 ? { dtick: Math.ceil(span / 6) } : {};
  };

  const layout = (panel, axis, narrow) => {
    const { text, quiet, grid, card } = ink();
    const scale = { gridcolor: grid, linecolor: quiet, zeroline: false, automargin: true, tickfont: { color: quiet } };
    const all = (key) => panel.views[axis].flatMap((series) => series[key]);
    const spelled = (values) => ({ exponentformat: values.some((value) => value >= 10000) ? "SI" : "power" });
    return {
      margin: { l: narrow && panel.names.length ? 12 : 48, r: 12, t: touch ? 30 : 8, b: 40 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: text, size: 11, family: getComputedStyle(document.body).fontFamily },
      hoverlabel: { bgcolor: card, font: { color: text, size: 12 }, align: "left" },
      hovermode: "closest", dragmode: touch ? false : "zoom", uirevision: axis,
      modebar: { bgcolor: "rgba(0,0,0,0)", color: quiet, activecolor: text },
      ...(printing ? { width: PRINTED_WIDTH, height: 200 } : { autosize: true }),
      xaxis: { ...scale, title: { text: escaped(axis), font: { size: 11, color: quiet }, standoff: 6 },
        ...(panel.log === "x" ? { type: "log", exponentformat: "power", ...decades(all("x")) } : spelled(all("x"))), rangemode: panel.fromZero[axis] ? "tozero" : "normal" },
      yaxis: { ...scale,
        ...(panel.log === "y" ? { type: "log", exponentformat: "power", ...decades([...all("y").filter((v) => v > panel.floor), panel.floor ?? 0]) } : spelled(all("y"))),
        ...(panel.floor !== null && { autorangeoptions: { minallowed: panel.log === "y" ? Math.log10(panel.floor) : panel.floor } }),
        ...(panel.names.length && { autorange: "reversed", tickvals: panel.names.map((_, i) => i), ticktext: panel.names.map(escaped), showticklabels: !narrow }) },
    };
  };

  const options = { responsive: true, displaylogo: false, modeBarButtons: [["zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]],
    displayModeBar: touch ? true : "hover" };

  class FigureView {
    constructor(element) {
      this.data = JSON.parse(element.querySelector("script").textContent);
      this.element = element;
      this.axis = this.data.axes[0];
      this.hidden = new Set();
      this.plots = [...element.querySelectorAll(".plot")];
      this.drawn = new Set();
      this.axisButtons = [...element.querySelectorAll(".axes button")];
      this.legendButtons = [...element.querySelectorAll(".legend button")];
      this.axisButtons.forEach((button) => button.addEventListener("click", () => this.choose(button.dataset.axis)));
      this.legendButtons.forEach((button) => {
        button.addEventListener("click", () => this.toggle(button.dataset.name));
        button.addEventListener("dblclick", () => this.isolate(button.dataset.name));
      });
    }

    draw(place) {
      const panel = this.data.panels[place];
      const axis = this.axis in panel.views ? this.axis : Object.keys(panel.views)[0];
      const narrow = printing || this.plots[place].clientWidth < 480;
      const drawn = [...traces(panel, axis, this.hidden, narrow), ...levels(panel, axis, this.hidden)];
      Plotly.react(this.plots[place], drawn, layout(panel, axis, narrow), options);
      this.drawn.add(place);
    }

    redraw() {
      this.axisButtons.forEach((button) => button.setAttribute("aria-pressed", button.dataset.axis === this.axis));
      this.legendButtons.forEach((button) => button.setAttribute("aria-pressed", !this.hidden.has(button.dataset.name)));
      this.drawn.forEach((place) => this.draw(place));
    }

    choose(axis) {
      this.axis = axis;
      this.redraw();
    }

    toggle(name) {
      if (!this.hidden.delete(name)) this.hidden.add(name);
      this.redraw();
    }

    isolate(name) {
      const others = this.legendButtons.map((button) => button.dataset.name).filter((other) => other !== name);
      this.hidden = new Set(others.every((other) => this.hidden.has(other)) ? [] : others);
      this.redraw();
    }
  }

  const figures = [...document.querySelectorAll("details.figure")].map((element) => new FigureView(element));
  const seen = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach(({ target }) => {
    seen.unobserve(target);
    const figure = figures.find((candidate) => candidate.plots.includes(target));
    figure.draw(figure.plots.indexOf(target));
  }), { rootMargin: "600px" });
  figures.forEach((figure) => figure.plots.forEach((plot) => seen.observe(plot)));

  dark.addEventListener("change", () => figures.forEach((figure) => figure.redraw()));
  addEventListener("beforeprint", () => {
    printing = true;
    figures.filter((figure) => figure.element.open).forEach((figure) => figure.plots.forEach((_, place) => figure.draw(place)));
  });
  addEventListener("afterprint", () => {
    printing = false;
    figures.forEach((figure) => figure.redraw());
  });
})();
