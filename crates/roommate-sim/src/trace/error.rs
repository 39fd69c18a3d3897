//! What can be wrong with a trace file, said with file, line and column.

use super::Format;
use std::borrow::Cow;
use std::path::Path;

/// A trace (or a table that belongs to it) could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("could not read {what} {path:?}: {}{problem}", self.place())]
pub struct TraceError {
    /// What kind of file it is: `trace` or `throughput table`.
    pub what: &'static str,
    /// The file, as it was named by the caller.
    pub path: Box<Path>,
    /// The line of the file, counted from 1; none when the file as a whole is wrong.
    pub line: Option<u64>,
    /// The column (or JSON key), where one is to blame.
    pub column: Option<&'static str>,
    /// What is wrong there.
    pub problem: Problem,
}

/// What is wrong, without the place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The operating system refused.
    #[error("{0}")]
    Io(String),
    /// No byte in it but blank space.
    #[error("the file is empty")]
    Empty,
    /// A gzip stream without its end.
    #[error("the gzip data ends early, so the file is not complete")]
    Truncated,
    /// A gzip stream that does not decode.
    #[error("broken gzip data ({0})")]
    Gzip(String),
    /// A line beyond the limit that keeps memory bounded.
    #[error("the line is longer than {limit_kib} KiB")]
    LongLine {
        /// The limit.
        limit_kib: usize,
    },
    /// A JSON object beyond the limit that keeps memory bounded.
    #[error("the JSON object is longer than {limit_kib} KiB")]
    LongObject {
        /// The limit.
        limit_kib: usize,
    },
    /// The header lacks columns.
    #[error("{0}")]
    Columns(String),
    /// No known layout has this first line.
    #[error("unknown trace layout, first line {0}")]
    Layout(String),
    /// Jobs are given in steps and nothing says how long a step takes.
    #[error("the jobs have step counts but no durations, and no throughput table was given")]
    NoThroughputs,
    /// Jobs are given in iterations of models and nothing says how long one takes.
    #[error("the jobs have iterations of models, and no table of models was given")]
    NoModels,
    /// The throughput table does not know the GPU model.
    #[error("no throughputs for GPU model {kind:?}; the table has {known}")]
    NoGpuModel {
        /// The kind asked for.
        kind: String,
        /// The kinds of the table.
        known: String,
    },
    /// The JSON around the jobs is broken, so no later job can be found.
    #[error("broken JSON: {0}")]
    JsonFile(String),
    /// One JSON object is broken or lacks a key.
    #[error("broken job: {0}")]
    Json(String),
    /// More or fewer fields than the header.
    #[error("expected {expected} fields, found {found}")]
    FieldCount {
        /// Fields of the header.
        expected: usize,
        /// Fields of this row.
        found: usize,
    },
    /// A value that does not fit its column.
    #[error("expected {expected}, found {found:?}")]
    Expected {
        /// What would have been right.
        expected: Cow<'static, str>,
        /// The start of what is there.
        found: String,
    },
    /// Bytes that are no text.
    #[error("not valid UTF-8")]
    Utf8,
    /// A quote that does not follow the CSV rules.
    #[error("{0}")]
    Quote(&'static str),
    /// Two jobs with one name.
    #[error("duplicate job id {0:?}")]
    Duplicate(String),
    /// The throughput table lacks this kind of job.
    #[error("no throughput for {0}")]
    NoThroughput(String),
}

/// Longest piece of a file that an error message repeats.
const SHOWN: usize = 60;

/// The start of `text`, short enough for a message.
pub(super) fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

impl Problem {
    pub(super) fn expected(expected: impl Into<Cow<'static, str>>, found: &str) -> Self {
        Self::Expected { expected: expected.into(), found: shown(found) }
    }

    /// True when only one row is wrong, so that reading can go on after it.
    pub fn is_row(&self) -> bool {
        matches!(
            self,
            Self::Json(_)
                | Self::FieldCount { .. }
                | Self::Expected { .. }
                | Self::Utf8
                | Self::Quote(_)
                | Self::Duplicate(_)
                | Self::NoThroughput(_)
        )
    }
}

impl TraceError {
    fn place(&self) -> String {
        match (self.line, self.column) {
            (None, None) => String::new(),
            (Some(line), None) => format!("line {line}: "),
            (Some(line), Some(column)) => format!("line {line}, column {column:?}: "),
            (None, Some(column)) => format!("column {column:?}: "),
        }
    }

    /// What the reader of the message can do about it, where we know.
    pub fn hint(&self) -> Option<String> {
        let hint = match &self.problem {
            Problem::NoThroughput(_) => {
                "pass a table that has it, or --skip-bad-rows to drop such rows and count them"
            }
            // A table that belongs to a trace is read whole or not at all.
            problem if problem.is_row() && self.what == "trace" => {
                "pass --skip-bad-rows to drop such rows and count them"
            }
            Problem::Layout(_) | Problem::Columns(_) if self.what == "trace" => {
                let names: Vec<&str> = Format::ALL[1..].iter().map(|f| f.name()).collect();
                let own = "our own columns are id, submit_s, gpus, duration_s";
                return Some(format!("pass --format with one of {}; {own}", names.join(", ")));
            }
            Problem::NoThroughputs => {
                "pass --throughputs with a CSV of columns gpu, job_type, scale_factor, steps_per_s"
            }
            Problem::NoModels => {
                "pass --throughputs with a CSV of columns model, iter_time_s, best_cpus_per_gpu, \
                 best_mem_gb_per_gpu, speedup"
            }
            Problem::NoGpuModel { .. } => "pass --gpu-kind with one of those",
            _ => return None,
        };
        Some(hint.to_owned())
    }
}

/// A wrong row, before file and line are known.
#[derive(Debug)]
pub(super) struct Bad {
    pub(super) column: Option<&'static str>,
    pub(super) problem: Problem,
}

impl Bad {
    pub(super) fn at(column: &'static str, problem: Problem) -> Self {
        Self { column: Some(column), problem }
    }
}

impl From<Problem> for Bad {
    fn from(problem: Problem) -> Self {
        Self { column: None, problem }
    }
}
