//! Errors of a scenario, with file, line and a hint.

use std::fmt::Display;
use std::path::Path;
use toml::Spanned;

/// A scenario that could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("could not read scenario {path:?}: {}{what}", self.place())]
pub struct ScenarioError {
    /// The file, as named by the caller.
    pub path: Box<Path>,
    /// The line, counted from 1; `None` if the error concerns the whole file.
    pub line: Option<usize>,
    /// The error.
    pub what: String,
    hint: Option<String>,
}

impl ScenarioError {
    /// An error that concerns the whole file.
    pub(super) fn whole(path: &Path, what: &impl Display) -> Self {
        Self { path: path.into(), line: None, what: what.to_string(), hint: None }
    }

    fn place(&self) -> String {
        self.line.map_or(String::new(), |line| format!("line {line}: "))
    }

    /// How to correct the error.
    pub fn hint(&self) -> String {
        let schema = "docs/reference/scenarios.md describes the file";
        self.hint.clone().unwrap_or_else(|| schema.into())
    }
}

/// The text of a scenario, from which lines are computed.
pub(super) struct Source<'a> {
    pub(super) path: &'a Path,
    pub(super) text: &'a str,
}

impl Source<'_> {
    fn error(&self, offset: Option<usize>, what: String, hint: Option<String>) -> ScenarioError {
        let before = |at: usize| self.text.get(..at).unwrap_or(self.text);
        let line = offset.map(|at| 1 + before(at).matches('\n').count());
        ScenarioError { path: self.path.into(), line, what, hint }
    }

    /// An error of this value.
    pub(super) fn at<T>(
        &self,
        value: &Spanned<T>,
        what: String,
        hint: Option<String>,
    ) -> ScenarioError {
        self.error(Some(value.span().start), what, hint)
    }

    /// An error of the field in the line that begins with `name`.
    pub(super) fn field(&self, name: &str, what: &str) -> ScenarioError {
        let begins = |line: &str| line.trim_start().starts_with(name);
        let lines = self.text.split_inclusive('\n');
        let line = lines.clone().position(begins);
        let offset = line.map(|i| lines.take(i).map(str::len).sum());
        self.error(offset, format!("{name}: {what}"), None)
    }

    /// A syntax error, or an unknown or missing field.
    pub(super) fn syntax(&self, error: &toml::de::Error) -> ScenarioError {
        let message = error.message().trim().replace('\n', ", ");
        let hint = unknown_field(&message);
        self.error(error.span().map(|s| s.start), message, hint)
    }
}

/// A suggestion for an unknown field, from the message of the TOML parser.
fn unknown_field(message: &str) -> Option<String> {
    let (field, rest) = message.strip_prefix("unknown field `")?.split_once('`')?;
    let known: Vec<&str> = rest.split('`').skip(1).step_by(2).collect();
    closest(field, &known)
}

/// The most similar known name, as a question; all known names if none is similar.
pub(super) fn closest(name: &str, known: &[&str]) -> Option<String> {
    let best = known.iter().map(|k| (strsim::levenshtein(name, k), *k)).min()?;
    let near = best.0 <= 1 + name.chars().count() / 3 || best.1.contains(name);
    Some(if near {
        format!("did you mean `{}`?", best.1)
    } else {
        format!("there are {}", known.join(", "))
    })
}
