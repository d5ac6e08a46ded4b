// The theme is the system's until the button is pressed. This runs before the page is painted, so that it does not flash.
"use strict";
{
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);

  const keep = (theme) => {
    try {
      if (theme) localStorage.setItem("theme", theme);
      else localStorage.removeItem("theme");
    } catch {
      // A browser that keeps nothing has the theme until the page is left.
    }
  };
  const kept = () => {
    try {
      return localStorage.getItem("theme");
    } catch {
      return null;
    }
  };

  if (["dark", "light"].includes(kept())) root.dataset.theme = kept();

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme-button");
    const label = () => {
      button.ariaLabel = button.title = `Change to the ${isDark() ? "light" : "dark"} theme`;
    };
    button.addEventListener("click", () => {
      const wanted = isDark() ? "light" : "dark";
      if ((wanted === "dark") === system.matches) {
        delete root.dataset.theme;
        keep(null);
      } else {
        root.dataset.theme = wanted;
        keep(wanted);
      }
      label();
    });
    system.addEventListener("change", label);
    label();
  });
}
