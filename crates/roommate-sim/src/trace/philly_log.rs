//! The original `cluster_job_log` of Philly: one JSON array of jobs, often on a single line.
//!
//! It is split into its objects by counting braces, so that one job at a time is in memory.

use super::collect::Collector;
use super::error::{Bad, Problem, TraceError};
use super::field::{self, MAX_GPUS};
use super::lines::Source;
use super::native::json_message;
use super::{Observed, Status, TraceJob};
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::collections::BTreeSet;

/// Longest accepted object in bytes; a job of 1000 attempts on 128 GPUs stays below it.
const MAX_OBJECT: usize = 4 << 20;

#[derive(Deserialize)]
struct LogJob {
    status: String,
    vc: Option<String>,
    jobid: String,
    #[serde(default)]
    attempts: Vec<Attempt>,
    submitted_time: Option<String>,
    user: Option<String>,
}

#[derive(Deserialize)]
struct Attempt {
    start_time: Option<String>,
    end_time: Option<String>,
    detail: Option<Vec<Detail>>,
}

#[derive(Deserialize)]
struct Detail {
    ip: Option<String>,
    gpus: Vec<IgnoredAny>,
}

/// Reads the array; every object counts as a row, located by the line where it begins.
pub(super) fn read(source: &mut Source, collector: &mut Collector) -> Result<(), TraceError> {
    let mut objects = Objects::default();
    while let Some((line, text)) = objects.next(source)? {
        if !collector.add(source, line, parse(text).map(Some))? {
            break;
        }
    }
    Ok(())
}

fn parse(text: &[u8]) -> Result<TraceJob, Bad> {
    let log: LogJob = serde_json::from_slice(text).map_err(|e| Problem::Json(json_message(&e)))?;
    let submitted = log.submitted_time.as_deref().unwrap_or_default();
    let submit = time("submitted_time", submitted)?;
    // Resources may change between attempts; the last attempt's are taken as the request.
    let detail = log.attempts.last().and_then(|a| a.detail.as_deref()).unwrap_or_default();
    let gpus = detail.iter().map(|part| part.gpus.len()).sum::<usize>();
    if gpus == 0 || gpus > MAX_GPUS as usize {
        let problem = Problem::expected("1 to 65535 GPUs in the last attempt", &gpus.to_string());
        return Err(Bad::at("detail", problem));
    }
    let mut duration = 0;
    for attempt in &log.attempts {
        duration += attempt.seconds()?;
    }
    let observed = Observed { machines: machines(detail), ..Observed::default() };
    let mut job = TraceJob::new(log.jobid, submit * 1_000_000, gpus as u32, duration as f64);
    job.status = Some(match log.status.as_str() {
        "Pass" => Status::Passed,
        "Killed" => Status::Killed,
        "Failed" => Status::Failed,
        other => {
            return Err(Bad::at("status", Problem::expected("Pass, Killed or Failed", other)));
        }
    });
    let first_start = log.attempts.iter().find_map(|a| known(a.start_time.as_deref()));
    if let Some(start) = first_start {
        // A start before the submission occurs only where the clock was set back: the queueing is
        // unknown.
        job.queue_s = time("start_time", start)?.checked_sub(submit).map(|s| s as f64);
    }
    job.attempts = log.attempts.len() as u32;
    job.observed = observed.boxed();
    job.team = log.vc.filter(|name| !name.is_empty());
    job.user = log.user.filter(|name| !name.is_empty());
    Ok(job)
}

/// Machines of an attempt; 0 where the log does not name them all.
fn machines(detail: &[Detail]) -> u32 {
    let names: Option<BTreeSet<&str>> = detail.iter().map(|part| part.ip.as_deref()).collect();
    names.map_or(0, |names| names.len() as u32)
}

impl Attempt {
    /// Run time of the attempt in seconds; 0 where the log lacks its start or end.
    fn seconds(&self) -> Result<u64, Bad> {
        let (Some(start), Some(end)) =
            (known(self.start_time.as_deref()), known(self.end_time.as_deref()))
        else {
            return Ok(0);
        };
        time("end_time", end)?.checked_sub(time("start_time", start)?).ok_or_else(|| {
            Bad::at("end_time", Problem::expected("an end not before the start", end))
        })
    }
}

/// The log writes an unknown time as null, and in places as the word None.
fn known(time: Option<&str>) -> Option<&str> {
    time.filter(|text| !text.is_empty() && *text != "None")
}

fn time(key: &'static str, text: &str) -> Result<u64, Bad> {
    field::timestamp(text).map_err(|problem| Bad::at(key, problem))
}

/// State of the splitter between two bytes.
#[derive(Clone, Copy, Default, PartialEq)]
enum At {
    /// Before the array.
    #[default]
    Start,
    /// In the array, where an object or the end may follow.
    First,
    /// After a comma, where an object must follow.
    Object,
    /// After an object, where a comma or the end must follow.
    Comma,
    /// Inside an object.
    Inside,
    /// Inside a string of an object.
    Text,
    /// After a backslash in such a string.
    Escape,
    /// After the array.
    End,
}

/// Splits the array into objects.
#[derive(Default)]
struct Objects {
    at: At,
    depth: u32,
    text: Vec<u8>,
    begins: u64,
}

impl Objects {
    /// The next object and the line where it begins.
    fn next(&mut self, source: &mut Source) -> Result<Option<(u64, &[u8])>, TraceError> {
        self.text.clear();
        loop {
            let line = source.line() + 1;
            let chunk = source.chunk()?;
            if chunk.is_empty() {
                return self.at_end(source);
            }
            let mut newlines = 0;
            let mut used = 0;
            let mut outcome = Ok(false);
            for &byte in chunk {
                used += 1;
                outcome = self.step(byte, line + newlines);
                newlines += u64::from(byte == b'\n');
                if !matches!(outcome, Ok(false)) {
                    break;
                }
            }
            source.consume(used, newlines);
            match outcome {
                Ok(true) => return Ok(Some((self.begins, &self.text))),
                Ok(false) => {}
                Err(problem) => return Err(source.error_at(line + newlines, problem.into())),
            }
        }
    }

    fn at_end(&self, source: &Source) -> Result<Option<(u64, &[u8])>, TraceError> {
        if self.at == At::End {
            return Ok(None);
        }
        let problem = Problem::JsonFile("the file ends inside the array of jobs".to_owned());
        Err(source.error_at(source.line() + 1, problem.into()))
    }

    /// Reads one byte; true when it closes an object.
    fn step(&mut self, byte: u8, line: u64) -> Result<bool, Problem> {
        match (self.at, byte) {
            (At::Text | At::Escape | At::Inside, _) => return self.inside(byte),
            (_, b' ' | b'\t' | b'\r' | b'\n') => {}
            (At::Start, b'[') => self.at = At::First,
            (At::First | At::Object, b'{') => {
                self.at = At::Inside;
                self.depth = 1;
                self.begins = line;
                self.text.push(byte);
            }
            (At::Comma, b',') => self.at = At::Object,
            (At::First | At::Comma, b']') => self.at = At::End,
            (at, _) => {
                let expected = match at {
                    At::Start => "the array of jobs",
                    At::First | At::Object => "a job in braces",
                    At::Comma => "a comma or the end of the array",
                    _ => "nothing after the array",
                };
                let found = char::from(byte);
                return Err(Problem::JsonFile(format!("expected {expected}, found {found:?}")));
            }
        }
        Ok(false)
    }

    fn inside(&mut self, byte: u8) -> Result<bool, Problem> {
        self.text.push(byte);
        if self.text.len() > MAX_OBJECT {
            return Err(Problem::LongObject { limit_kib: MAX_OBJECT >> 10 });
        }
        match (self.at, byte) {
            (At::Escape, _) | (At::Inside, b'"') => self.at = At::Text,
            (At::Text, b'\\') => self.at = At::Escape,
            (At::Text, b'"') => self.at = At::Inside,
            (At::Inside, b'{' | b'[') => self.depth += 1,
            (At::Inside, b'}' | b']') => {
                self.depth -= 1;
                if self.depth == 0 {
                    self.at = At::Comma;
                    return Ok(true);
                }
            }
            _ => {}
        }
        Ok(false)
    }
}
