"use strict";
// Each figure is JSON for Plotly, next to its place on the page. It is drawn when it comes near the window.
(() => {
  const narrow = matchMedia("(max-width: 48rem)");
  const touch = matchMedia("(pointer: coarse)").matches; // there a finger scrolls the page instead of zooming, and Plotly's tools would cover the buttons
  const options = { responsive: true, displaylogo: false, displayModeBar: touch || narrow.matches ? false : "hover", modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
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

  // A link of the menu opens the section that it leads to.
  const unfold = () => {
    const section = location.hash.length > 1 && document.getElementById(location.hash.slice(1))?.querySelector("details.section");
    if (section) section.open = true;
  };
  addEventListener("hashchange", unfold);
  unfold();

  const sections = [...document.querySelectorAll("details.section")];
  const button = document.querySelector("button.fold");
  if (button) {
    const name = () => { button.textContent = sections.every((section) => section.open) ? "Fold all" : "Unfold all"; };
    button.hidden = false;
    button.addEventListener("click", () => {
      const open = !sections.every((section) => section.open);
      sections.forEach((section) => { section.open = open; });
      name();
    });
    sections.forEach((section) => section.addEventListener("toggle", name));
  }

  // Paper has everything that can be unfolded but the lists of runs, which are as long as the rest.
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details.section:not([open]), details.figure:not([open])")];
    folded.forEach((element) => { element.open = true; });
    plots.filter((plot) => !plot.drawn).forEach(draw);
  });
  addEventListener("afterprint", () => folded.forEach((element) => { element.open = false; }));
})();
