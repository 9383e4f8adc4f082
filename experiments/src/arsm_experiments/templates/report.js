"use strict";
// Each figure is JSON for Plotly, next to its place on the page. It is drawn when it comes near the window.
(() => {
  const narrow = matchMedia("(max-width: 48rem)");
  const touch = matchMedia("(pointer: coarse)").matches; // there a finger scrolls the page instead of zooming, and Plotly's tools would cover the buttons
  const options = { responsive: true, displaylogo: false, displayModeBar: touch ? false : "hover", modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
  const draw = (plot) => {
    plot.drawn ??= JSON.parse(plot.nextElementSibling.textContent);
    const layout = structuredClone(narrow.matches ? plot.drawn.narrow : plot.drawn.wide);
    layout.updatemenus.forEach((menu) => { menu.buttons = plot.drawn.buttons; });
    Plotly.react(plot, plot.drawn.data, { ...layout, dragmode: touch ? false : "zoom" }, options);
  };
  const plots = [...document.querySelectorAll(".plot")];
  const near = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach(({ target }) => {
    near.unobserve(target);
    draw(target);
  }), { rootMargin: "600px" });
  plots.forEach((plot) => near.observe(plot));
  narrow.addEventListener("change", () => plots.filter((plot) => plot.drawn).forEach(draw));
  addEventListener("beforeprint", () => plots.filter((plot) => !plot.drawn && plot.closest("details").open).forEach(draw));
})();
