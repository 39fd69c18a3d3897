//! Job files: YAML that describes a job. Strict: an unknown field is an error that names the field
//! which was probably meant.

pub(crate) mod check;
mod kind;
pub mod service;

use crate::error::JobFileError;
use crate::protocol::BatchRange;
use check::LONGEST_NAME;
use roommate_core::idx::{ProfileIdx, TeamIdx};
use roommate_core::job::{Class, GUARANTEED_SLOWDOWN, Retries, Slo, Spec};
use roommate_core::knobs::Knobs;
use roommate_core::number::Number;
use roommate_core::performance::goodput::{LrRule, Noise, Training};
use roommate_core::profile::Profile;
use roommate_core::time::{Span, Time};
use serde::{Deserialize, Serialize};
use service::Service;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use yaml_serde::Value;

/// A job file that shows every field.
pub const EXAMPLE: &str = include_str!("example.yaml");

/// How a user finds out what a job file may contain.
pub(crate) const HINT: &str = "`roommate submit --example` shows every field";

/// Fields of a job.
const FIELDS: &[&str] = &[
    "name",
    "command",
    "workdir",
    "env",
    "devices",
    "share",
    "batch",
    "class",
    "max_slowdown",
    "deadline",
    "team",
    "retries",
    "checkpoint",
    "steps",
    "step_s",
    "stages_s",
    "profile",
    "sdk",
    "gpu_mib",
    "memory_mib",
    "cpus",
    "service",
];
/// Additional fields of a job inside a mix.
const IN_MIX: &[&str] = &["after", "file"];
/// Fields of a mix.
const OF_MIX: &[&str] = &["policy", "set", "devices", "jobs"];

/// The command of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Command {
    /// A line for `sh -c`.
    Line(String),
    /// A program and its arguments.
    Words(Vec<String>),
}

impl Command {
    /// The program and its arguments.
    pub fn words(&self) -> Vec<String> {
        match self {
            Self::Line(line) => vec!["sh".into(), "-c".into(), line.clone()],
            Self::Words(words) => words.clone(),
        }
    }
}

/// Classes in a job file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClassName {
    /// Its requested resources are reserved for it.
    #[default]
    Guaranteed,
    /// It uses what other jobs leave.
    BestEffort,
    /// It answers requests, and keeps a latency.
    Service,
}

/// The content of a job file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobFile {
    /// Its name; the default is that of the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What to run.
    pub command: Command,
    /// Working directory, relative to the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workdir: Option<PathBuf>,
    /// Variables added to the environment of the user who submits it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Number of devices.
    #[serde(default = "one")]
    pub devices: u16,
    /// The guaranteed share of each device; 0 = nothing, it uses idle capacity.
    #[serde(default = "whole")]
    pub share: f64,
    /// Batch sizes that it supports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch: Option<BatchRange>,
    /// Its class; the default is guaranteed, without a promise about roommates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<ClassName>,
    /// Promised: roommates make its steps at most this many times as long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_slowdown: Option<f64>,
    /// When it has to finish, counted from its submission.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<Length>,
    /// Its team.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub team: Option<String>,
    /// How often it is restarted after failures.
    #[serde(default = "usual_retries")]
    pub retries: Retries,
    /// Folder of its checkpoints, relative to the file; the default is inside the daemon's state.
    /// The job gets it as `ROOMMATE_CHECKPOINT`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<PathBuf>,
    /// Number of steps, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps: Option<f64>,
    /// Seconds per step alone, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_s: Option<f64>,
    /// Seconds per step in each stage (load, preprocess, compute, sync), if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stages_s: Option<[f64; 4]>,
    /// Name of its kind of work, which jobs of the same work share; by default the command without
    /// what differs from job to job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// Whether it uses the SDK, through which it keeps to its share of a GPU.
    #[serde(default, skip_serializing_if = "is_false")]
    pub sdk: bool,
    /// GPU memory that it needs on each GPU, and its limit; 0 = no limit.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub gpu_mib: u32,
    /// Host memory per device.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub memory_mib: u32,
    /// CPU cores per device; not accounted for unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<f64>,
    /// How requests reach it, if it is a service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<Service>,
}

/// A duration: `90`, `25ms`, `90s`, `15m`, `2h`, `3d`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "LengthForm", into = "f64")]
pub struct Length(pub f64);

#[derive(Deserialize)]
#[serde(untagged)]
enum LengthForm {
    Seconds(f64),
    Text(String),
}

impl TryFrom<LengthForm> for Length {
    type Error = String;
    fn try_from(form: LengthForm) -> Result<Self, String> {
        let seconds = match &form {
            LengthForm::Seconds(s) => Some(*s),
            LengthForm::Text(text) => length_of(text),
        };
        let shown = || match &form {
            LengthForm::Seconds(s) => s.to_string(),
            LengthForm::Text(text) => format!("{text:?}"),
        };
        let good = seconds.filter(|s| s.is_finite() && (0.0..1e10).contains(s));
        good.map(Self).ok_or_else(|| {
            format!("expected a length of time such as 90s, 15m or 2h, found {}", shown())
        })
    }
}

impl From<Length> for f64 {
    fn from(length: Length) -> Self {
        length.0
    }
}

/// A length of time in seconds, from text like `90`, `25ms`, `90s`, `1.5m`, `2h` or `3d`.
pub fn length_of(text: &str) -> Option<f64> {
    if let Some(ms) = text.trim().strip_suffix("ms") {
        return Some(ms.trim().parse::<f64>().ok()? / 1e3);
    }
    let (number, unit) = match text.trim().split_at_checked(text.trim().len().saturating_sub(1))? {
        (number, "s") => (number, 1.0),
        (number, "m") => (number, 60.0),
        (number, "h") => (number, 3_600.0),
        (number, "d") => (number, 86_400.0),
        _ => (text.trim(), 1.0),
    };
    Some(number.trim().parse::<f64>().ok()? * unit)
}

fn one() -> u16 {
    1
}

fn whole() -> f64 {
    1.0
}

/// Errors of the user would repeat; other failures are worth a retry.
fn usual_retries() -> Retries {
    Retries { user: 0, infra: 3, unknown: 1 }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde wants a reference")]
fn is_false(v: &bool) -> bool {
    !*v
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde wants a reference")]
fn is_zero(v: &u32) -> bool {
    *v == 0
}

/// Several jobs and how to run them, for `roommate run`.
#[derive(Clone, Debug, PartialEq)]
pub struct Mix {
    /// The policy, if given.
    pub policy: Option<String>,
    /// Its parameters.
    pub set: serde_json::Map<String, serde_json::Value>,
    /// Number of devices, if given.
    pub devices: Option<u16>,
    /// The jobs, each with the delay of its submission in seconds.
    pub jobs: Vec<(f64, JobFile)>,
}

impl JobFile {
    /// Reads a job file. Paths in it are relative to the folder of the file.
    pub fn read(text: &str, file: &Path) -> Result<Self, JobFileError> {
        let at = Place::of_jobs(file);
        let value = parse(text, &at)?;
        check_fields(&value, &[FIELDS], &at)?;
        // Parsed from the text again, because then errors contain the line.
        let job: Self = yaml_serde::from_str(text).map_err(|e| at.wrong(plain(&e)))?;
        job.settled(file, &at)
    }

    fn settled(mut self, file: &Path, at: &Place) -> Result<Self, JobFileError> {
        let folder = file.parent().map_or_else(PathBuf::new, Path::to_path_buf);
        self.workdir = Some(folder.join(self.workdir.unwrap_or_default()));
        self.checkpoint = self.checkpoint.map(|c| folder.join(c));
        if self.name.is_none() {
            let stem = file.file_stem().map(|s| s.to_string_lossy().into_owned());
            self.name =
                Some(stem.filter(|s| !s.is_empty() && s != "-").unwrap_or_else(|| "job".into()));
        }
        self.check().map_err(|what| at.wrong(what))?;
        Ok(self)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.name.as_deref().unwrap_or("job")
    }

    /// Name of its kind of work: jobs of one kind are expected to slow others, and to be slowed, in
    /// the same way, in this run of the daemon and in later ones. It is that of its profile if it
    /// names one, else its command without what differs from job to job.
    pub fn kind(&self) -> String {
        self.profile.clone().unwrap_or_else(|| kind::of(self))
    }

    /// What it is promised: that roommates make its steps at most this many times as long.
    pub fn max_slowdown(&self) -> Option<f64> {
        let promised = self.class == Some(ClassName::Guaranteed);
        self.max_slowdown.or(promised.then_some(GUARANTEED_SLOWDOWN))
    }

    /// Its profile as far as the file declares it.
    pub fn profile(&self) -> Profile {
        let stages: Option<f64> = self.stages_s.map(|s| s.iter().sum());
        let step_s = self.step_s.or(stages.filter(|s| *s > 0.0));
        let training = self.batch.map(|b| Training {
            batch: b.size,
            batch_min: b.min,
            batch_max: b.max,
            // The job adapts its learning rate itself, and reports noise and memory.
            lr: LrRule::default(),
            noise: Noise::default(),
            memory: Vec::new(),
        });
        let stages_s = self.stages_s.map(|s| s.map(Number::of));
        // What is told of a service is the length of its batches.
        let step_unknown = step_s.is_none() && self.class != Some(ClassName::Service);
        let step_s = step_s.unwrap_or(Profile::UNKNOWN_STEP_S);
        Profile { step_unknown, stages_s, training, ..Profile::of_step(step_s) }
    }

    /// The job as the engine gets it if it is submitted now.
    pub fn spec(&self, profile: ProfileIdx, team: TeamIdx, now: Time) -> Spec {
        let share = (self.share * 1000.0).round() as u16;
        Spec {
            gpus_max: self.devices,
            knobs: Knobs {
                sm_permille: share,
                cpu_milli: self.cpus.map_or(0, |c| (c * 1000.0).round() as u32),
                host_mib: self.memory_mib,
                mem_mib: self.gpu_mib,
                ..Knobs::WHOLE
            },
            team,
            class: match self.class.unwrap_or_default() {
                ClassName::Guaranteed => Class::Guaranteed,
                ClassName::BestEffort => Class::BestEffort,
                ClassName::Service => Class::Service,
            },
            // Policies know no other quantile; the machine keeps the one that is meant.
            slo: self.service.as_ref().map(|s| Slo { p99_us: s.slo.us() }),
            work: self.steps.map(Number::of),
            max_slowdown: self.max_slowdown().map(Number::of),
            declared_s: self.steps.zip(self.step_s).map(|(n, s)| Number::of(n * s)),
            deadline: self.deadline.map(|d| now + Span::from_secs(d.0)),
            retries: self.retries,
            ..Spec::training(self.devices, 0.0, profile)
        }
    }
}

impl Mix {
    /// Reads a mix. A job in it is written in place or names its `file`; `after` delays its
    /// submission.
    pub fn read(
        text: &str,
        file: &Path,
        open: impl Fn(&Path) -> std::io::Result<String>,
    ) -> Result<Self, JobFileError> {
        let at = Place::of_jobs(file);
        let value = parse(text, &at)?;
        check_fields(&value, &[OF_MIX], &at)?;
        let field = |name: &str| value.get(name).cloned().filter(|v| !v.is_null());
        let unusable = |name: &str, v: Value, at: &Place| {
            at.wrong(format!("{name}: could not use {}", shown(&v)))
        };
        let policy = match field("policy") {
            None => None,
            Some(Value::String(p)) => Some(p),
            Some(v) => return Err(unusable("policy", v, &at)),
        };
        let set = match field("set") {
            None => serde_json::Map::new(),
            Some(v) => {
                yaml_serde::from_value(v).map_err(|e| at.wrong(format!("set: {}", plain(&e))))?
            }
        };
        let devices = match field("devices") {
            None => None,
            Some(v) => Some(
                yaml_serde::from_value(v)
                    .map_err(|e| at.wrong(format!("devices: {}", plain(&e))))?,
            ),
        };
        let Some(Value::Sequence(entries)) = field("jobs") else {
            return Err(at.wrong("jobs: expected a list of jobs".into()));
        };
        let mut jobs = Vec::new();
        for (i, entry) in entries.into_iter().enumerate() {
            let at = Place { job: Some(i + 1), ..at.clone() };
            jobs.push(Self::entry(entry, file, &at, &open)?);
        }
        if jobs.is_empty() {
            return Err(at.wrong("jobs: there is nothing to run".into()));
        }
        jobs.sort_by(|a, b| a.0.total_cmp(&b.0));
        Ok(Self { policy, set, devices, jobs })
    }

    fn entry(
        mut entry: Value,
        mix: &Path,
        at: &Place,
        open: &impl Fn(&Path) -> std::io::Result<String>,
    ) -> Result<(f64, JobFile), JobFileError> {
        check_fields(&entry, &[FIELDS, IN_MIX], at)?;
        let fields = entry.as_mapping_mut().expect("its fields were just checked");
        let after = match fields.remove("after") {
            None => Length(0.0),
            Some(v) => {
                yaml_serde::from_value(v).map_err(|e| at.wrong(format!("after: {}", plain(&e))))?
            }
        };
        let job = match fields.remove("file") {
            Some(_) if !fields.is_empty() => {
                return Err(at.wrong("a job names its file or is written out, not both".into()));
            }
            Some(Value::String(name)) => {
                let path = mix.parent().map_or_else(PathBuf::new, Path::to_path_buf).join(name);
                let text = open(&path)
                    .map_err(|e| at.wrong(format!("file {:?}: {e}", path.display().to_string())))?;
                JobFile::read(&text, &path)?
            }
            Some(v) => return Err(at.wrong(format!("file: could not use {}", shown(&v)))),
            None => {
                let job: JobFile =
                    yaml_serde::from_value(entry).map_err(|e| at.wrong(plain(&e)))?;
                let named = job.name.is_some();
                let mut job = job.settled(mix, at)?;
                if !named {
                    job.name = Some(format!("{}-{}", job.name(), at.job.unwrap_or(1)));
                }
                job
            }
        };
        Ok((after.0, job))
    }
}

/// A position in a file, for errors.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Place {
    pub(crate) file: String,
    pub(crate) job: Option<usize>,
    /// How the user finds out what such files may contain.
    pub(crate) hint: &'static str,
}

impl Place {
    fn of_jobs(file: &Path) -> Self {
        Self { file: file.display().to_string(), job: None, hint: HINT }
    }

    pub(crate) fn wrong(&self, what: String) -> JobFileError {
        let job = self.job.map_or(String::new(), |n| format!(", job {n}"));
        let hint = Some(self.hint.into());
        JobFileError { file: format!("{}{job}", self.file), what, hint }
    }

    /// The same with another hint.
    pub(crate) fn wrong_with(&self, what: String, hint: String) -> JobFileError {
        JobFileError { hint: Some(hint), ..self.wrong(what) }
    }
}

/// Most bytes of a file of jobs.
pub const LONGEST_FILE: usize = 1 << 20;
/// Most levels of lists and fields inside each other; a parser's time grows with their square.
const DEEPEST: usize = 500;

pub(crate) fn parse(text: &str, at: &Place) -> Result<Value, JobFileError> {
    if text.len() > LONGEST_FILE {
        let what = format!("the file has more than {LONGEST_FILE} bytes, which is the limit");
        return Err(at.wrong(what));
    }
    if is_too_deep(text) {
        let what = format!("lists and fields are more than {DEEPEST} levels inside each other");
        return Err(at.wrong(what));
    }
    yaml_serde::from_str(text).map_err(|e| at.wrong(format!("not YAML: {}", plain(&e))))
}

/// Whether brackets or indentation make more than [`DEEPEST`] levels. Brackets in text count as
/// well; text leaves no such number of them open.
fn is_too_deep(text: &str) -> bool {
    let mut open = 0_usize;
    text.lines().any(|line| {
        let indentation = line.bytes().take_while(|b| b" -?".contains(b)).count();
        indentation > 2 * DEEPEST
            || line.bytes().any(|b| {
                match b {
                    b'[' | b'{' => open += 1,
                    b']' | b'}' => open = open.saturating_sub(1),
                    _ => {}
                }
                open > DEEPEST
            })
    })
}

pub(crate) fn check_fields(
    value: &Value,
    known: &[&[&str]],
    at: &Place,
) -> Result<(), JobFileError> {
    let Some(fields) = value.as_mapping() else {
        return Err(at.wrong(format!("expected fields such as `command:`, found {}", shown(value))));
    };
    let all = || known.iter().flat_map(|k| k.iter().copied());
    for field in fields.keys() {
        let name = field.as_str().map_or_else(|| shown(field), str::to_string);
        if all().any(|k| k == name) {
            continue;
        }
        return Err(at.wrong_with(format!("unknown field {name:?}"), meant(&name, all())));
    }
    Ok(())
}

/// The hint for an unknown name.
pub(crate) fn meant<'a>(name: &str, known: impl Iterator<Item = &'a str> + Clone) -> String {
    match nearest(name, known.clone()) {
        Some(meant) => format!("did you mean {meant:?}?"),
        None => format!("there are {}", known.collect::<Vec<_>>().join(", ")),
    }
}

/// The most similar known name, if it is similar enough. Nothing is similar to a name that is too
/// long to be one, and comparing it would take long.
pub fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    if name.len() > 4 * LONGEST_NAME {
        return None;
    }
    let name = name.to_lowercase();
    let known = known.filter(|k| k.len() <= 4 * LONGEST_NAME);
    let ranked = known.map(|k| (strsim::osa_distance(&name, k), k));
    ranked.filter(|(d, k)| *d <= 2.max(k.len() / 3)).min_by_key(|(d, _)| *d).map(|(_, k)| k)
}

/// A value on one line, for error messages.
pub(crate) fn shown(value: &Value) -> String {
    let text = yaml_serde::to_string(value).unwrap_or_default();
    let line = text.trim().replace('\n', " ");
    if line.chars().count() > 60 {
        line.chars().take(57).chain("...".chars()).collect()
    } else {
        line
    }
}

/// The parser's error on one line.
pub(crate) fn plain(error: &yaml_serde::Error) -> String {
    error.to_string().replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(text: &str) -> String {
        match JobFile::read(text, Path::new("dir/job.yaml")) {
            Ok(job) => format!("{} {:?}", job.name(), job.command.words()),
            Err(e) => format!("{e} | {}", e.hint().unwrap_or_default()),
        }
    }

    /// The field in a comment, if it contains one. The example is no service.
    fn uncommented(line: &str) -> Option<&str> {
        let field = line.strip_prefix("# ")?;
        let mut of_training = FIELDS.iter().filter(|f| **f != "service");
        of_training.any(|f| field.starts_with(&format!("{f}:"))).then_some(field)
    }

    #[test]
    fn the_example_shows_every_field_and_reads() {
        let job = JobFile::read(EXAMPLE, Path::new("example.yaml")).unwrap();
        assert_eq!(job.name(), "resnet");
        for field in FIELDS.iter().filter(|f| **f != "service") {
            let shown = |l: &str| uncommented(l).unwrap_or(l).starts_with(&format!("{field}:"));
            assert!(EXAMPLE.lines().any(shown), "{field} is not in the example");
        }
        // The fields that are commented out are valid as well.
        let all: String =
            EXAMPLE.lines().map(|l| uncommented(l).unwrap_or(l).to_string() + "\n").collect();
        JobFile::read(&all, Path::new("example.yaml")).unwrap();
    }

    #[test]
    fn the_example_shows_a_service() {
        let lines = EXAMPLE.lines().skip_while(|l| *l != "# service:");
        let section: String =
            lines.map_while(|l| l.strip_prefix("# ")).map(|l| l.to_string() + "\n").collect();
        let text = format!("command: x\nclass: service\n{section}");
        let service = JobFile::read(&text, Path::new("example.yaml")).unwrap().service.unwrap();
        let serde_json::Value::Object(shown) = serde_json::to_value(&service).unwrap() else {
            panic!("a section has fields")
        };
        assert_eq!(shown.len(), 11, "every field: {shown:?}");
    }

    #[test]
    fn short_files_suffice() {
        assert_eq!(outcome("command: echo hello"), r#"job ["sh", "-c", "echo hello"]"#);
        assert_eq!(outcome("command: [echo, hello]\nname: x"), r#"x ["echo", "hello"]"#);
    }

    #[test]
    fn mistakes_are_reported_with_a_suggestion() {
        let check =
            |text: &str, expect: &str| assert_eq!(outcome(text), format!("dir/job.yaml: {expect}"));
        let example = "`roommate submit --example` shows every field";
        check("comand: x", r#"unknown field "comand" | did you mean "command"?"#);
        check("command: x\nretires: 3", r#"unknown field "retires" | did you mean "retries"?"#);
        check("command: x\ngpus: 3", r#"unknown field "gpus" | did you mean "cpus"?"#);
        check(
            "command: x\nxyzzyxyzzy: 3",
            &format!(r#"unknown field "xyzzyxyzzy" | there are {}"#, FIELDS.join(", ")),
        );
        check(
            "just text",
            &format!("expected fields such as `command:`, found just text | {example}"),
        );
        check("name: x", &format!("missing field `command` | {example}"));
        check("command: ''", &format!("command: there is nothing to run | {example}"));
        check("command: []", &format!("command: there is nothing to run | {example}"));
        check("command: x\nshare: 2", &format!("share: expected 0 to 1, found 2 | {example}"));
        check(
            "command: x\ndevices: 0",
            &format!("devices: expected at least 1, found 0 | {example}"),
        );
        check(
            "command: x\nname: a/b",
            &format!("name: expected letters, digits, `-`, `_` and `.`, found \"a/b\" | {example}"),
        );
        check(
            "command: x\nbatch: {size: 8, min: 16, max: 32}",
            &format!("batch: expected 1 <= min <= size <= max, found 16, 8, 32 | {example}"),
        );
        let bad = outcome("command: x\nname: [");
        assert!(bad.starts_with("dir/job.yaml: not YAML: ") && bad.contains("line 3"), "{bad}");
        let bad = outcome("command: x\nclass: servant");
        assert!(bad.contains("unknown variant `servant`") && bad.contains("line 2"), "{bad}");
        let bad = outcome("command: x\ndeadline: soon");
        assert!(bad.contains("90s, 15m or 2h, found \"soon\""), "{bad}");
    }

    #[test]
    fn files_of_absurd_size_or_depth_are_refused_quickly() {
        let began = std::time::Instant::now();
        let depth = "lists and fields are more than 500 levels inside each other";
        for (text, what) in [
            (format!("command: {}", "x".repeat(LONGEST_FILE)), "more than 1048576 bytes"),
            (format!("command: {}", "[".repeat(400_000)), depth),
            (format!("command: {}", "{a: ".repeat(200_000)), depth),
            (format!("command:\n  {}x", "- ".repeat(200_000)), depth),
            ((0..1_400).flat_map(|i| [" ".repeat(i), "a:\n".into()]).collect(), depth),
        ] {
            let error = outcome(&text);
            assert!(error.contains(what), "{}: {}", &text[..20], &error[..error.len().min(300)]);
        }
        assert!(began.elapsed() < std::time::Duration::from_secs(1));
        let script = "command: |\n  for i in [[ a ]]; do echo ${i} {x,y}; done\n".to_string();
        assert!(outcome(&script).starts_with("job "));
    }

    #[test]
    fn nothing_is_similar_to_an_endless_name() {
        let began = std::time::Instant::now();
        let known = vec!["a-name-of-a-job"; 1_000];
        assert_eq!(nearest("a-nmae-of-a-job", known.iter().copied()), Some("a-name-of-a-job"));
        assert_eq!(nearest(&"x".repeat(2_000_000), known.iter().copied()), None);
        assert!(began.elapsed() < std::time::Duration::from_secs(1));
    }

    #[test]
    fn durations_may_have_units() {
        for (text, s) in [
            ("90", 90.0),
            ("90s", 90.0),
            ("90ms", 0.09),
            ("1.5m", 90.0),
            ("2h", 7200.0),
            ("3d", 259_200.0),
        ] {
            assert_eq!(length_of(text), Some(s), "{text}");
        }
        for text in ["", "m", "ms", "2w", "-"] {
            assert_eq!(length_of(text), None, "{text}");
        }
    }

    #[test]
    fn a_mix_contains_jobs_in_place_and_from_files() {
        let open = |path: &Path| {
            assert_eq!(path, Path::new("dir/other.yaml"));
            Ok("command: two".to_string())
        };
        let text = "policy: gandiva\njobs:\n- {command: one, after: 2s}\n- file: other.yaml\n";
        let mix = Mix::read(text, Path::new("dir/mix.yaml"), open).unwrap();
        let jobs: Vec<_> = mix.jobs.iter().map(|(after, j)| (*after, j.name())).collect();
        assert_eq!(jobs, [(0.0, "other"), (2.0, "mix-1")]);
        let bad = |text: &str| Mix::read(text, Path::new("m.yaml"), open).unwrap_err();
        assert_eq!(bad("jobs: []").to_string(), "m.yaml: jobs: there is nothing to run");
        let wrong = bad("jobs:\n- {command: x}\n- {command: x, polcy: y}");
        assert_eq!(wrong.to_string(), "m.yaml, job 2: unknown field \"polcy\"");
        assert_eq!(bad("job: []").hint().unwrap(), "did you mean \"jobs\"?");
    }
}
