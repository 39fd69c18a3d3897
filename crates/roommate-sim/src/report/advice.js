  // Continues words.js for the advice: its figures are drawn without a script.

  themes(() => {});
})();
