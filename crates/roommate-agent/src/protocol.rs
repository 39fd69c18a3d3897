//! What a tenant and its machine say to each other: JSON lines over a Unix socket, one message each.
//!
//! The Python SDK speaks the other side; `python/tests/protocol.jsonl` holds a sample of every message
//! that both have to read and write alike.

use roommate_core::profile::STAGES;
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, Read};

/// Version of the protocol.
pub const VERSION: u32 = 1;

/// A longer line is nonsense.
pub const LONGEST_LINE: usize = 64 * 1024;

/// Names of the stages of a step, in the order of [`STAGES`].
pub const STAGE_NAMES: [&str; STAGES.len()] = ["load", "preprocess", "compute", "sync"];

/// Batch sizes that a job can work with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchRange {
    /// Its own.
    pub size: u32,
    /// The smallest.
    pub min: u32,
    /// The largest.
    pub max: u32,
}

/// A part of a GPU: some of its multiprocessors (SMs).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SmRange {
    /// The number of its first one.
    pub first: u16,
    /// How many.
    pub sms: u16,
}

/// What a tenant says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromTenant {
    /// Comes first: who is here.
    Hello(Hello),
    /// Steps were done since the last such message.
    Stepped(Stepped),
    /// The job runs in the way it was asked to.
    Tuned(Tuned),
    /// The job stands still between two steps and has let go of what it can.
    Suspended(Done),
    /// The job goes on.
    Resumed(Nothing),
    /// So much work survives a restart.
    Checkpointed(Done),
    /// The job waits to enter a stage.
    Enter(Stage),
    /// The job left a stage.
    Leave(Stage),
}

/// What the machine says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToTenant {
    /// Answers a hello: who you are and how you run.
    Welcome(Welcome),
    /// Run in this way from the next step on.
    Tune(Tune),
    /// Stand still at the end of this step and let go of what you can.
    Suspend(Nothing),
    /// Go on.
    Resume(Nothing),
    /// Save at the end of this step.
    Checkpoint(Nothing),
    /// Save at the end of this step and exit.
    Stop(Nothing),
    /// Enter the stage.
    Go(Stage),
    /// What you said makes no sense; the last word on this connection.
    Refused(Refused),
}

/// No fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nothing {}

/// Who is here.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hello {
    /// Version of the protocol that it speaks.
    pub version: u32,
    /// What it was given when it was started.
    pub token: String,
    /// Its process.
    pub pid: u32,
    /// Batch sizes that it can work with, if more than one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch: Option<BatchRange>,
}

/// Steps that were done.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stepped {
    /// Steps since the last message.
    pub steps: u64,
    /// Work in all, in steps of the job's own batch size.
    pub done: f64,
    /// Mean seconds of a step, pauses left out.
    pub step_s: f64,
    /// Batch size now.
    pub batch: u32,
    /// Mean seconds of a step that it waited for its data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_s: Option<f64>,
    /// Gradient noise scale, where measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub noise_scale: Option<f64>,
    /// Memory of the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mem_mib: Option<u32>,
    /// GPU memory that it holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_mib: Option<u32>,
    /// Mean seconds of a step in each stage, where marked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stages_s: Option<[f64; 4]>,
}

/// How it runs now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tuned {
    /// Batch size; 0 = its own.
    pub batch: u32,
    /// Most of its own speed.
    pub pace_permille: u16,
    /// The part of the GPU that it runs in; `None` = the whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seat: Option<SmRange>,
}

/// Work, in steps of the job's own batch size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Done {
    /// So much.
    pub done: f64,
}

/// A stage of a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stage {
    /// One of [`STAGE_NAMES`].
    pub stage: String,
}

/// Who you are and how you run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Welcome {
    /// Version of the protocol.
    pub version: u32,
    /// Name of the job.
    pub job: String,
    /// Work that survived from earlier attempts.
    pub done: f64,
    /// How to run.
    #[serde(flatten)]
    pub tune: Tune,
    /// Whether it has to stand still.
    #[serde(default, skip_serializing_if = "is_false")]
    pub suspended: bool,
    /// SMs of the smallest part that it may ever be given: the first steps at each batch size are taken in one
    /// of that size, because plans that were chosen on more fail there; 0 = it is never confined.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub plan_sms: u32,
}

/// How to run: what knobs, users, roommates and guards come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tune {
    /// Batch size to use; 0 = your own.
    pub batch: u32,
    /// Most of its own speed.
    pub pace_permille: u16,
    /// Whether stages are entered one job at a time.
    #[serde(default, skip_serializing_if = "is_false")]
    pub interleaved: bool,
    /// The part of the GPU to run in; `None` = the whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seat: Option<SmRange>,
    /// The most GPU memory to hold; 0 = no limit.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub gpu_mib: u32,
}

/// Reason the machine hangs up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Refused {
    /// In words.
    pub reason: String,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde wants a reference")]
fn is_zero(v: &u32) -> bool {
    *v == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde wants a reference")]
fn is_false(v: &bool) -> bool {
    !*v
}

impl ToTenant {
    /// The message as a line.
    pub fn line(&self) -> Vec<u8> {
        let mut line = serde_json::to_vec(self).expect("a message can always be written");
        line.push(b'\n');
        line
    }
}

impl FromTenant {
    /// The message in a line, or what is wrong with it.
    pub fn read(line: &[u8]) -> Result<Self, String> {
        let message: Self = serde_json::from_slice(line).map_err(|e| e.to_string())?;
        let sane = |v: f64| v.is_finite() && (0.0..1e15).contains(&v);
        match &message {
            Self::Stepped(s) => {
                let all = [s.done, s.step_s, s.load_s.unwrap_or(0.0), s.noise_scale.unwrap_or(0.0)];
                let stages = s.stages_s.unwrap_or_default();
                if !all.iter().chain(&stages).all(|v| sane(*v)) {
                    return Err("a number that cannot be".into());
                }
            }
            Self::Suspended(d) | Self::Checkpointed(d) if !sane(d.done) => {
                return Err("a number that cannot be".into());
            }
            Self::Enter(s) | Self::Leave(s) if stage_index(&s.stage).is_none() => {
                return Err(format!("unknown stage {:?}", s.stage));
            }
            Self::Hello(Hello { batch: Some(b), .. })
                if !(1 <= b.min && b.min <= b.size && b.size <= b.max) =>
            {
                return Err("a batch range that is not 1 <= min <= size <= max".into());
            }
            _ => {}
        }
        Ok(message)
    }
}

/// Which of [`STAGE_NAMES`] it is.
pub fn stage_index(name: &str) -> Option<u8> {
    STAGE_NAMES.iter().position(|s| *s == name).map(|i| i as u8)
}

/// The next line without its end, at most [`LONGEST_LINE`] long; `None` at the end of the stream.
pub(crate) fn read_line(from: &mut impl BufRead) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    let got = from.take(LONGEST_LINE as u64 + 1).read_until(b'\n', &mut line)?;
    if got == 0 {
        return Ok(None);
    }
    if line.last() == Some(&b'\n') {
        line.pop();
    } else if got > LONGEST_LINE {
        let what = format!("a line of more than {LONGEST_LINE} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    Ok(Some(line))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same file that the SDK's tests read.
    const GOLDEN: &str = include_str!("../../../python/tests/protocol.jsonl");

    #[test]
    fn golden_messages_read_and_write_the_same() {
        let (mut tenant, mut machine) = (0, 0);
        for line in GOLDEN.lines() {
            let again = if let Ok(message) = FromTenant::read(line.as_bytes()) {
                tenant += 1;
                serde_json::to_string(&message).unwrap()
            } else {
                machine += 1;
                let message: ToTenant = serde_json::from_str(line).unwrap();
                String::from_utf8(message.line()).unwrap().trim_end().to_string()
            };
            assert_eq!(again, line);
        }
        assert_eq!((tenant, machine), (12, 12));
    }

    #[test]
    fn nonsense_is_named() {
        let check = |line: &str, what: &str| {
            let said = FromTenant::read(line.as_bytes()).unwrap_err();
            assert!(said.contains(what), "{line}: {said}");
        };
        check("hello", "expected value");
        check(r#"{"helo":{}}"#, "unknown variant `helo`");
        check(r#"{"suspend":{}}"#, "unknown variant `suspend`");
        check(r#"{"suspended":{}}"#, "missing field `done`");
        check(r#"{"suspended":{"done":-1}}"#, "a number that cannot be");
        check(r#"{"suspended":{"done":1e300}}"#, "a number that cannot be");
        check(r#"{"enter":{"stage":"lunch"}}"#, "unknown stage");
        check(r#"{"tuned":{"batch":-1,"pace_permille":1}}"#, "invalid value");
        check(
            r#"{"hello":{"version":1,"token":"","pid":1,"batch":{"size":1,"min":2,"max":3}}}"#,
            "a batch range",
        );
    }

    #[test]
    fn endless_lines_are_refused() {
        let endless = vec![b'x'; LONGEST_LINE + 10];
        assert!(read_line(&mut endless.as_slice()).is_err());
        let mut two = &b"a\nb"[..];
        assert_eq!(read_line(&mut two).unwrap().unwrap(), b"a");
        assert_eq!(read_line(&mut two).unwrap().unwrap(), b"b");
        assert_eq!(read_line(&mut two).unwrap(), None);
    }
}
