//! Rows of measurement files: one JSON object per line. `profiles/README.md` explains the fields.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// The kind of task that was measured.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TaskKind {
    /// A training task: one step after the other.
    Train,
    /// A service: batches as they arrive.
    Serve,
}

/// GPU counters over a run: percent, or MiB/s where the name says so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
pub struct Gpm {
    /// Time during which any kernel ran.
    pub graphics: f64,
    /// SMs with work.
    pub sm_util: f64,
    /// Memory bandwidth.
    pub dram: f64,
    /// Traffic received over the bus: inputs stay on the GPU, so mostly kernel launch commands.
    pub pcie_rx_mib_s: f64,
}

/// A task alone on some SMs.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Solo {
    /// Training or service.
    pub kind: TaskKind,
    /// Its name.
    pub name: String,
    /// Its batch size.
    pub batch: u32,
    /// SMs that it was confined to.
    pub sms: u32,
    /// Memory reserved at peak, MiB.
    pub mem_mib: f64,
    /// Steps per second.
    pub it_s: f64,
    /// GPU counters, if recorded.
    #[serde(default)]
    pub gpm: Option<Gpm>,
    /// Seconds from launch to the first step, where the process was started for this run.
    #[serde(default)]
    pub start_s: Option<f64>,
}

/// A training task alone on the whole GPU in a session that measured pairs.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Alone {
    /// Name of the task.
    pub a: String,
    /// Its batch size.
    pub batch: u32,
    /// Steps per second.
    pub it_s: f64,
    /// GPU counters.
    pub gpm: Gpm,
}

/// Result of one side of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct Rate {
    /// Steps per second.
    pub it_s: f64,
}

/// Two training tasks side by side, each on the whole GPU or on a partition.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Trainings {
    /// Name of one task.
    pub a: String,
    /// Its batch size.
    pub batch_a: u32,
    /// Name of the other task.
    pub b: String,
    /// Its batch size.
    pub batch_b: u32,
    /// SMs that `a` was confined to, if it was.
    #[serde(default)]
    pub sms_a: Option<u32>,
    /// SMs that `b` was confined to, if it was.
    #[serde(default)]
    pub sms_b: Option<u32>,
    /// The task with priority, if one had it: 0 = `a`, 1 = `b`.
    #[serde(default)]
    pub first: Option<usize>,
    /// Result of `a`.
    pub ra: Rate,
    /// Result of `b`.
    pub rb: Rate,
}

/// Several training tasks side by side, each on the whole GPU or on a partition.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Group {
    /// Names of the tasks.
    pub tasks: Vec<String>,
    /// Their batch sizes.
    pub batches: Vec<u32>,
    /// SMs that each was confined to, if they were.
    #[serde(default)]
    pub sms: Option<Vec<u32>>,
    /// Index of the task with priority, if one had it.
    #[serde(default)]
    pub first: Option<usize>,
    /// Result of each.
    pub r: Vec<Rate>,
}

/// A training task beside a service, on disjoint SMs.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Mixed {
    /// Name of the training task.
    pub a: String,
    /// Its batch size.
    pub batch_a: u32,
    /// Name of the service.
    pub b: String,
    /// Its batch size.
    pub batch_b: u32,
    /// SMs of the training task.
    pub sms_a: u32,
    /// SMs of the service.
    pub sms_b: u32,
    /// Batches that arrive per second.
    pub rate_b: f64,
    /// Result of the training task.
    pub ra: Rate,
}

/// A training task beside a service in a closed loop (one batch after the other), on disjoint SMs.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Closed {
    /// Name of the training task.
    pub a: String,
    /// Its batch size.
    pub batch_a: u32,
    /// Name of the service.
    pub b: String,
    /// Its batch size.
    pub batch_b: u32,
    /// SMs of the training task.
    pub sms_a: u32,
    /// SMs of the service.
    pub sms_b: u32,
    /// Result of the training task.
    pub ra: Rate,
    /// Result of the service.
    pub rb: Rate,
}

/// A measurement of any kind.
#[derive(Clone, Debug, PartialEq)]
pub enum Row {
    /// Alone on some SMs.
    Solo(Solo),
    /// Alone, in a session that measured pairs.
    Alone(Alone),
    /// Two training tasks.
    Trainings(Trainings),
    /// Three training tasks or more.
    Group(Group),
    /// A training task and a service.
    Mixed(Mixed),
    /// A training task and a service in a closed loop.
    Closed(Closed),
}

/// A row that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowError {
    /// Its line, from 1.
    pub line: usize,
    /// What is wrong with it.
    pub what: String,
}

impl fmt::Display for RowError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.what)
    }
}

impl std::error::Error for RowError {}

/// All rows of a file; empty lines and failed measurements are skipped.
pub fn parse(text: &str) -> Result<Vec<Row>, RowError> {
    Ok(rounds(text)?.into_iter().flatten().collect())
}

/// All rows of a file by measuring round; rows without a round belong to the first.
pub fn rounds(text: &str) -> Result<Vec<Vec<Row>>, RowError> {
    let mut rounds: BTreeMap<u32, Vec<Row>> = BTreeMap::new();
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    for (i, line) in lines {
        if let Some((round, row)) = row(line).map_err(|what| RowError { line: i + 1, what })? {
            rounds.entry(round).or_default().push(row);
        }
    }
    Ok(rounds.into_values().collect())
}

#[derive(Deserialize)]
#[serde(tag = "k", rename_all = "snake_case")]
enum Tagged {
    Solo(Alone),
    Tt(Trainings),
    Ttt(Group),
    Ts(Mixed),
    Tc(Closed),
}

#[derive(Deserialize)]
struct Probe {
    k: Option<serde_json::Value>,
    kind: Option<serde_json::Value>,
    error: Option<String>,
    #[serde(default)]
    round: u32,
}

/// A row and its round; `None` for a failed measurement.
fn row(line: &str) -> Result<Option<(u32, Row)>, String> {
    let plainly = |e: serde_json::Error| {
        // There is only one line; the caller adds its number.
        let text = e.to_string();
        text.split(" at line ").next().unwrap_or(&text).to_string()
    };
    let probe: Probe = serde_json::from_str(line).map_err(plainly)?;
    let round = probe.round;
    let row = match probe {
        Probe { error: Some(_), .. } => return Ok(None),
        Probe { k: Some(_), .. } => match serde_json::from_str(line).map_err(plainly)? {
            Tagged::Solo(alone) => Row::Alone(alone),
            Tagged::Tt(pair) => Row::Trainings(pair),
            Tagged::Ttt(group) => Row::Group(group),
            Tagged::Ts(pair) => Row::Mixed(pair),
            Tagged::Tc(pair) => Row::Closed(pair),
        },
        Probe { kind: Some(_), .. } => Row::Solo(serde_json::from_str(line).map_err(plainly)?),
        Probe { .. } => return Err("neither `kind` (a run alone) nor `k` (a pair)".into()),
    };
    row.check().map(|()| Some((round, row)))
}

impl Row {
    fn check(&self) -> Result<(), String> {
        match self {
            Self::Solo(r) => {
                all([whole("batch", r.batch), whole("sms", r.sms), positive("it_s", r.it_s)])?;
                all([positive("mem_mib", r.mem_mib), r.gpm.map_or(Ok(()), Gpm::check)])
            }
            Self::Alone(r) => {
                all([whole("batch", r.batch), positive("it_s", r.it_s), r.gpm.check()])
            }
            Self::Trainings(r) => {
                all([whole("batch_a", r.batch_a), whole("batch_b", r.batch_b)])?;
                if r.sms_a.is_some() != r.sms_b.is_some() {
                    return Err("one of `sms_a` and `sms_b` is missing".into());
                }
                one_of(r.first, 2)?;
                all([r.ra.check(), r.rb.check()])
            }
            Self::Group(r) => {
                if r.tasks.len() != r.batches.len() || r.tasks.len() != r.r.len() {
                    return Err("`tasks`, `batches` and `r` differ in length".into());
                }
                if r.sms.as_ref().is_some_and(|sms| sms.len() != r.tasks.len()) {
                    return Err("`tasks` and `sms` differ in length".into());
                }
                one_of(r.first, r.tasks.len())?;
                all(r.batches.iter().map(|b| whole("batches", *b)))?;
                all(r.r.iter().map(|rate| rate.check()))
            }
            Self::Mixed(r) => {
                all([whole("batch_a", r.batch_a), whole("batch_b", r.batch_b)])?;
                all([whole("sms_a", r.sms_a), whole("sms_b", r.sms_b)])?;
                all([r.ra.check(), positive("rate_b", r.rate_b)])
            }
            Self::Closed(r) => {
                all([whole("batch_a", r.batch_a), whole("batch_b", r.batch_b)])?;
                all([whole("sms_a", r.sms_a), whole("sms_b", r.sms_b)])?;
                all([r.ra.check(), positive("it_s of rb", r.rb.it_s)])
            }
        }
    }
}

impl Gpm {
    fn check(self) -> Result<(), String> {
        let percent = |name: &str, v: f64| {
            let ok = (0.0..=110.0).contains(&v);
            if ok { Ok(()) } else { Err(format!("{name} is {v}, expected percent")) }
        };
        percent("graphics", self.graphics)?;
        percent("sm_util", self.sm_util)?;
        percent("dram", self.dram)?;
        not_negative("pcie_rx_mib_s", self.pcie_rx_mib_s)
    }
}

impl Rate {
    /// Beside a heavy roommate a short run may complete no step at all.
    fn check(self) -> Result<(), String> {
        not_negative("it_s", self.it_s)
    }
}

fn all(checks: impl IntoIterator<Item = Result<(), String>>) -> Result<(), String> {
    checks.into_iter().collect()
}

fn positive(name: &str, v: f64) -> Result<(), String> {
    let ok = v.is_finite() && v > 0.0;
    if ok { Ok(()) } else { Err(format!("{name} is {v}, expected a number above 0")) }
}

fn not_negative(name: &str, v: f64) -> Result<(), String> {
    let ok = v.is_finite() && v >= 0.0;
    if ok { Ok(()) } else { Err(format!("{name} is {v}, expected 0 or more")) }
}

fn one_of(first: Option<usize>, tasks: usize) -> Result<(), String> {
    match first.filter(|i| *i >= tasks) {
        Some(i) => Err(format!("first is {i}, expected the index of one of {tasks} tasks")),
        None => Ok(()),
    }
}

fn whole(name: &str, v: u32) -> Result<(), String> {
    if v > 0 { Ok(()) } else { Err(format!("{name} is 0, expected 1 or more")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_row_is_named_by_its_line() {
        let gpm = r#""gpm":{"graphics":90,"sm_util":80,"dram":20,"pcie_rx_mib_s":50}"#;
        let good = format!(r#"{{"k":"solo","a":"x","batch":8,"it_s":2.5,{gpm}}}"#);
        assert_eq!(parse(&format!("{good}\n\n{good}\n")).map(|rows| rows.len()), Ok(2));
        let wrong = |line: &str| parse(&format!("{good}\n{line}\n")).unwrap_err().to_string();
        assert_eq!(parse(r#"{"k":"tt","a":"x","error":"x: it ended"}"#), Ok(Vec::new()));
        assert_eq!(wrong("{}"), "line 2: neither `kind` (a run alone) nor `k` (a pair)");
        assert_eq!(wrong("{"), "line 2: EOF while parsing an object");
        assert_eq!(
            wrong(&good.replace("solo", "trio")),
            "line 2: unknown variant `trio`, expected one of `solo`, `tt`, `ttt`, `ts`, `tc`"
        );
        assert_eq!(wrong(&good.replace(r#""it_s":2.5,"#, "")), "line 2: missing field `it_s`");
        assert_eq!(
            wrong(&good.replace("2.5", "-1")),
            "line 2: it_s is -1, expected a number above 0"
        );
        assert_eq!(
            wrong(&good.replace(":80", ":8000")),
            "line 2: sm_util is 8000, expected percent"
        );
    }
}
