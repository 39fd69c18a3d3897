//! Messages between a tenant and its machine: JSON lines over a Unix socket.
//!
//! The Python SDK implements the tenant's side; `python/tests/protocol.jsonl` holds a sample of
//! every message that both sides have to read and write alike.

pub mod front;

use roommate_core::knobs::Knobs;
use roommate_core::number::Number;
use roommate_core::profile::STAGES;
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, Read};
use std::ops::RangeInclusive;

/// Version of the protocol.
pub const VERSION: u32 = 1;

/// The oldest version that is still spoken, with tenants that say so in their hello.
pub const OLDEST: u32 = 1;

/// The versions that this machine speaks.
pub(crate) const SPOKEN: RangeInclusive<u32> = OLDEST..=VERSION;

/// Longest token that a hello may have.
const LONGEST_TOKEN: usize = 256;

/// Longest line that is accepted.
pub const LONGEST_LINE: usize = 64 * 1024;

/// Most steps in a message; as a float they are still exact.
const MOST_STEPS: u64 = Number::MOST.get() as u64;

/// Names of the stages of a step, in the order of [`STAGES`].
pub const STAGE_NAMES: [&str; STAGES.len()] = ["load", "preprocess", "compute", "sync"];

/// Batch sizes that a job supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchRange {
    /// The job's own batch size.
    pub size: u32,
    /// The smallest.
    pub min: u32,
    /// The largest.
    pub max: u32,
}

impl BatchRange {
    /// Whether its sizes are in order.
    pub(crate) fn is_sane(&self) -> bool {
        1 <= self.min && self.min <= self.size && self.size <= self.max
    }
}

/// A contiguous range of a GPU's SMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SmRange {
    /// The first SM.
    pub first: u16,
    /// Number of SMs.
    pub sms: u16,
}

/// Messages of a tenant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromTenant {
    /// The first message: identifies the tenant.
    Hello(Hello),
    /// Steps done since the last such message.
    Stepped(Stepped),
    /// The requested knobs are applied.
    Tuned(Tuned),
    /// The job is suspended between two steps and has released what it can.
    Suspended(Done),
    /// The job has resumed.
    Resumed(Nothing),
    /// This much work survives a restart.
    Checkpointed(Done),
    /// The job waits to enter a stage.
    Enter(Stage),
    /// The job left a stage.
    Leave(Stage),
    /// Requests that a service answered since the last such message.
    Served(Served),
}

/// Messages of the machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToTenant {
    /// Answers `Hello`: the job's name, progress and knobs.
    Welcome(Welcome),
    /// Apply these knobs from the next step on.
    Tune(Tune),
    /// Suspend at the end of this step and release what you can.
    Suspend(Nothing),
    /// Resume.
    Resume(Nothing),
    /// Save a checkpoint at the end of this step.
    Checkpoint(Nothing),
    /// Save a checkpoint at the end of this step and exit.
    Stop(Nothing),
    /// The stage may be entered.
    Go(Stage),
    /// The last message was not valid, or there is no room; the connection is closed.
    Refused(Refused),
}

/// No fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nothing {}

/// Identifies a tenant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hello {
    /// Version of the protocol that the tenant implements.
    pub version: u32,
    /// The token from the tenant's environment.
    pub token: String,
    /// The tenant's pid.
    pub pid: u32,
    /// Batch sizes that the job supports, if more than one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch: Option<BatchRange>,
}

/// Steps done.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stepped {
    /// Steps since the last message.
    pub steps: u64,
    /// Work in all, in steps of the job's own batch size.
    pub done: f64,
    /// Mean seconds of a step, without pauses.
    pub step_s: f64,
    /// Batch size now.
    pub batch: u32,
    /// Mean seconds per step spent waiting for data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_s: Option<f64>,
    /// Gradient noise scale, if measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub noise_scale: Option<f64>,
    /// Host memory of the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mem_mib: Option<u32>,
    /// GPU memory of the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_mib: Option<u32>,
    /// Mean seconds per step in each stage, if the job marks stages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stages_s: Option<[f64; 4]>,
}

/// The knobs in force.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tuned {
    /// Batch size; 0 = the job's own.
    pub batch: u32,
    /// Upper limit of the job's own speed.
    pub pace_permille: u16,
    /// The SM range that it is confined to; `None` = the whole GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seat: Option<SmRange>,
}

/// Work, in steps of the job's own batch size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Done {
    /// Steps.
    pub done: f64,
}

/// A stage of a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stage {
    /// One of [`STAGE_NAMES`].
    pub stage: String,
}

/// What the front of a service measured over a window.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Served {
    /// Length of the window.
    pub window_us: u64,
    /// Requests that were answered or given up.
    pub requests: u64,
    /// Those answered later than the objective, or not at all.
    pub late: u64,
    /// Those refused for want of room.
    pub refused: u64,
    /// Those that the worker failed to answer.
    pub failed: u64,
    /// Median latency.
    pub p50_us: u32,
    /// 99th percentile of latency.
    pub p99_us: u32,
    /// Largest latency.
    pub worst_us: u32,
    /// How much of the objective the most urgent request has used up or will have: its age and the
    /// time that its batch is expected to take, relative to the objective.
    pub pressure_permille: u32,
    /// Requests that wait now.
    pub queued: u32,
    /// Mean number of requests in a batch.
    pub batch: f64,
    /// Part of the window in which the worker was busy.
    pub busy_permille: u16,
    /// Part of the window in which it held back its roommates' kernel launches.
    #[serde(default)]
    pub held_permille: u16,
    /// Whether the worker answers.
    pub ready: bool,
}

impl Served {
    /// Both windows together: counts add up, latencies are means weighted by requests, and of what
    /// describes a moment the later one counts; the pressure is the larger one, so that no alarm is
    /// lost.
    pub(crate) fn and(&self, later: &Self) -> Self {
        let requests = self.requests.saturating_add(later.requests);
        let window_us = self.window_us.saturating_add(later.window_us);
        let mean = |a: f64, a_weight: u64, b: f64, b_weight: u64| {
            let sum = a_weight as f64 + b_weight as f64;
            if sum > 0.0 { (a * a_weight as f64 + b * b_weight as f64) / sum } else { b }
        };
        let by_requests = |a: f64, b: f64| mean(a, self.requests, b, later.requests);
        let latency = |a: u32, b: u32| by_requests(a.into(), b.into()).round() as u32;
        let by_time = |a: u16, b: u16| {
            mean(a.into(), self.window_us, b.into(), later.window_us).round() as u16
        };
        Self {
            window_us,
            requests,
            late: self.late.saturating_add(later.late),
            refused: self.refused.saturating_add(later.refused),
            failed: self.failed.saturating_add(later.failed),
            p50_us: latency(self.p50_us, later.p50_us),
            p99_us: latency(self.p99_us, later.p99_us),
            worst_us: self.worst_us.max(later.worst_us),
            pressure_permille: self.pressure_permille.max(later.pressure_permille),
            queued: later.queued,
            batch: by_requests(self.batch, later.batch),
            busy_permille: by_time(self.busy_permille, later.busy_permille),
            held_permille: by_time(self.held_permille, later.held_permille),
            ready: later.ready,
        }
    }

    fn check(&self) -> Result<(), String> {
        let most = [self.window_us, self.requests, self.refused, self.failed];
        if most.iter().any(|n| *n > MOST_STEPS) || Number::try_from(self.batch).is_err() {
            return Err("a number out of range".into());
        }
        if self.late > self.requests {
            return Err("more late requests than requests".into());
        }
        if self.busy_permille.max(self.held_permille) > 1000 {
            return Err("busy for more than the window".into());
        }
        Ok(())
    }
}

/// The job's name, progress and knobs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Welcome {
    /// Version of the protocol.
    pub version: u32,
    /// Name of the job.
    pub job: String,
    /// Work saved by earlier attempts.
    pub done: f64,
    /// Knobs to apply.
    #[serde(flatten)]
    pub tune: Tune,
    /// Whether the job has to start suspended.
    #[serde(default, skip_serializing_if = "is_false")]
    pub suspended: bool,
    /// SMs of the smallest range that the job may ever be confined to; 0 = it is never confined.
    /// The first steps at each batch size run in a range of that size, because execution plans
    /// chosen with more SMs fail in it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub plan_sms: u32,
}

/// Knobs as the tenant applies them: the result of the policy's knobs, requests of users, roommates
/// and guards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tune {
    /// Batch size; 0 = the job's own.
    pub batch: u32,
    /// Upper limit of the job's own speed.
    pub pace_permille: u16,
    /// Whether the job has to ask before it enters a stage.
    #[serde(default, skip_serializing_if = "is_false")]
    pub interleaved: bool,
    /// The SM range to be confined to; `None` = the whole GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seat: Option<SmRange>,
    /// Most GPU memory to hold; 0 = no limit.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub gpu_mib: u32,
    /// Whether its kernels go before those of roommates.
    #[serde(default, skip_serializing_if = "is_false")]
    pub priority: bool,
    /// For a service: how long to fill a batch at most; 0 = its own choice.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub fill_us: u32,
    /// For a service: whether roommates use what it leaves of the GPU.
    #[serde(default, skip_serializing_if = "is_false")]
    pub shared: bool,
}

impl Tune {
    /// What the knobs alone ask for: no partition, no limit of memory, no turns.
    pub fn of(knobs: &Knobs) -> Self {
        Self {
            batch: knobs.batch,
            pace_permille: knobs.pace_permille,
            interleaved: false,
            seat: None,
            gpu_mib: 0,
            priority: knobs.priority,
            fill_us: knobs.fill_us,
            shared: false,
        }
    }
}

/// Why the machine closes the connection. Unknown fields are ignored, so that every SDK can read
/// the refusal of a newer machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Refused {
    /// The reason as a sentence.
    pub reason: String,
    /// The tenant may try again after this many seconds; `None` = never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub later_s: Option<f64>,
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
    /// Parses and checks a line.
    pub fn read(line: &[u8]) -> Result<Self, String> {
        let message: Self = serde_json::from_slice(line).map_err(|e| e.to_string())?;
        let sane = |v: f64| Number::try_from(v).is_ok();
        match &message {
            Self::Stepped(s) => {
                let all = [s.done, s.step_s, s.load_s.unwrap_or(0.0), s.noise_scale.unwrap_or(0.0)];
                let stages = s.stages_s.unwrap_or_default();
                if s.steps > MOST_STEPS || !all.iter().chain(&stages).all(|v| sane(*v)) {
                    return Err("a number out of range".into());
                }
            }
            Self::Suspended(d) | Self::Checkpointed(d) if !sane(d.done) => {
                return Err("a number out of range".into());
            }
            Self::Enter(s) | Self::Leave(s) if stage_index(&s.stage).is_none() => {
                return Err(format!("unknown stage {:?}", s.stage));
            }
            Self::Served(served) => served.check()?,
            Self::Hello(Hello { token, .. }) if token.len() > LONGEST_TOKEN => {
                return Err(format!("a token of more than {LONGEST_TOKEN} bytes"));
            }
            Self::Hello(Hello { batch: Some(b), .. }) if !b.is_sane() => {
                return Err("a batch range that is not 1 <= min <= size <= max".into());
            }
            Self::Tuned(Tuned { seat: Some(s), .. })
                if s.sms == 0 || s.first.checked_add(s.sms).is_none() =>
            {
                return Err("a range of SMs that no GPU has".into());
            }
            _ => {}
        }
        Ok(message)
    }
}

impl Hello {
    /// The version in which the tenant is answered, which is its own.
    pub(crate) fn common_version(&self, spoken: RangeInclusive<u32>) -> Result<u32, String> {
        let (theirs, oldest, newest) = (self.version, *spoken.start(), *spoken.end());
        if spoken.contains(&theirs) {
            return Ok(theirs);
        }
        let ours = if oldest == newest {
            format!("version {newest}")
        } else {
            format!("versions {oldest} to {newest}")
        };
        Err(format!("the SDK uses protocol version {theirs}, this machine {ours}"))
    }
}

/// Index of a name in [`STAGE_NAMES`].
pub fn stage_index(name: &str) -> Option<u8> {
    STAGE_NAMES.iter().position(|s| *s == name).map(|i| i as u8)
}

/// The next line without its end, of at most [`LONGEST_LINE`] bytes; `None` at the end of the
/// stream.
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

    const SERVED: &str = r#"{"served":{"window_us":100000,"requests":120,"late":1,"refused":0,"failed":0,"p50_us":4100,"p99_us":11800,"worst_us":14100,"pressure_permille":430,"queued":3,"batch":7.5,"busy_permille":610,"held_permille":240,"ready":true}}"#;

    #[test]
    fn windows_add_up() {
        let Ok(FromTenant::Served(a)) = FromTenant::read(SERVED.as_bytes()) else { panic!() };
        let b = Served {
            window_us: 300_000,
            requests: 40,
            late: 3,
            p50_us: 8_100,
            pressure_permille: 90,
            queued: 0,
            batch: 1.5,
            busy_permille: 10,
            held_permille: 40,
            ready: false,
            ..a
        };
        let both = a.and(&b);
        assert_eq!((both.window_us, both.requests, both.late), (400_000, 160, 4));
        assert_eq!((both.p50_us, both.pressure_permille, both.queued), (5_100, 430, 0));
        assert_eq!((both.batch, both.busy_permille, both.held_permille), (6.0, 160, 90));
        assert!(!both.ready);
        // A window without requests says nothing of latencies.
        let none = Served { requests: 0, late: 0, p50_us: 0, p99_us: 0, ..b };
        assert_eq!(a.and(&none).p99_us, a.p99_us);
        assert_eq!(none.and(&a).p99_us, a.p99_us);
        let most = Served { requests: u64::MAX, late: u64::MAX, ..a.clone() };
        assert_eq!(most.and(&most).late, u64::MAX);
    }

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
        assert_eq!((tenant, machine), (14, 13));
    }

    #[test]
    fn invalid_messages_are_refused_with_a_reason() {
        let check = |line: &str, what: &str| {
            let error = FromTenant::read(line.as_bytes()).unwrap_err();
            assert!(error.contains(what), "{line}: {error}");
        };
        check("hello", "expected value");
        check(r#"{"helo":{}}"#, "unknown variant `helo`");
        check(r#"{"suspend":{}}"#, "unknown variant `suspend`");
        check(r#"{"suspended":{}}"#, "missing field `done`");
        check(r#"{"suspended":{"done":-1}}"#, "a number out of range");
        check(r#"{"suspended":{"done":1e300}}"#, "a number out of range");
        for steps in [u64::MAX, 1 << 63, MOST_STEPS + 1] {
            let line =
                format!(r#"{{"stepped":{{"steps":{steps},"done":1,"step_s":1,"batch":1}}}}"#);
            check(&line, "a number out of range");
        }
        check(r#"{"tuned":{"batch":1,"pace_permille":1,"seat":{"first":9,"sms":0}}}"#, "of SMs");
        let far = r#"{"tuned":{"batch":1,"pace_permille":1,"seat":{"first":65535,"sms":9}}}"#;
        check(far, "a range of SMs that no GPU has");
        check(r#"{"enter":{"stage":"lunch"}}"#, "unknown stage");
        check(r#"{"tuned":{"batch":-1,"pace_permille":1}}"#, "invalid value");
        let served = |change: &str| {
            let mut fields: serde_json::Value = serde_json::from_str(SERVED).unwrap();
            let (name, value) = change.split_once('=').unwrap();
            fields["served"][name] = serde_json::from_str(value).unwrap();
            fields.to_string()
        };
        check(&served("requests=2000000000000000"), "a number out of range");
        check(&served("batch=-1.0"), "a number out of range");
        check(&served("late=121"), "more late requests than requests");
        check(&served("busy_permille=1001"), "busy for more than the window");
        check(&served("pressure_permille=-1"), "invalid value");
        check(&served("extra=1"), "unknown field `extra`");
        let long = "x".repeat(LONGEST_TOKEN + 1);
        check(&format!(r#"{{"hello":{{"version":1,"token":"{long}","pid":1}}}}"#), "a token of");
        check(
            r#"{"hello":{"version":1,"token":"","pid":1,"batch":{"size":1,"min":2,"max":3}}}"#,
            "a batch range",
        );
    }

    #[test]
    fn tenants_are_answered_in_their_own_version() {
        let hello = |version| Hello { version, token: String::new(), pid: 1, batch: None };
        assert_eq!(hello(VERSION).common_version(SPOKEN), Ok(VERSION));
        assert_eq!([4, 5].map(|v| hello(v).common_version(4..=5)), [Ok(4), Ok(5)]);
        for other in [0, 3, 6, u32::MAX] {
            let why = hello(other).common_version(4..=5).unwrap_err();
            assert!(why.ends_with("this machine versions 4 to 5"), "{why}");
        }
        let why = hello(9).common_version(1..=1).unwrap_err();
        assert_eq!(why, "the SDK uses protocol version 9, this machine version 1");
    }

    #[test]
    fn a_refusal_of_a_newer_machine_can_be_read() {
        let line = r#"{"refused":{"reason":"full","later_s":2.0,"versions":[2,3]}}"#;
        let refused = Refused { reason: "full".into(), later_s: Some(2.0) };
        assert_eq!(serde_json::from_str::<ToTenant>(line).unwrap(), ToTenant::Refused(refused));
    }

    #[test]
    fn overlong_lines_are_refused() {
        let endless = vec![b'x'; LONGEST_LINE + 10];
        assert!(read_line(&mut endless.as_slice()).is_err());
        let mut two = &b"a\nb"[..];
        assert_eq!(read_line(&mut two).unwrap().unwrap(), b"a");
        assert_eq!(read_line(&mut two).unwrap().unwrap(), b"b");
        assert_eq!(read_line(&mut two).unwrap(), None);
    }
}
