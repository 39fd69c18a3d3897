//! The plan of a measurement: a YAML list of commands, and the sets that run side by side. It is
//! checked as strictly as job files, with the same error messages.

mod split;

use crate::api::job_file::{self, Command, Place, meant, plain, shown};
use crate::error::JobFileError;
use crate::protocol::SmRange;
use roommate_core::measurement::advice::Way;
use roommate_core::measurement::rows::TaskKind;
use roommate_core::measurement::search;
use serde::Deserialize;
use serde_json::json;
use split::{Split, Splits, group};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use yaml_serde::Value;

/// A plan that shows every field.
pub const EXAMPLE: &str = include_str!("example.yaml");

/// Fields of a plan.
const FIELDS: &[&str] = &[
    "tasks",
    "sets",
    "splits",
    "bound",
    "tries",
    "seconds",
    "settle",
    "rounds",
    "mps",
    "devices",
    "sms",
    "env",
    "starting",
    "start_within",
];
/// Fields of a task.
const OF_TASK: &[&str] = &["name", "kind", "command", "workdir", "env", "batches", "sms"];
/// Fields of a set.
const OF_SET: &[&str] = &["tasks", "batches", "splits"];
/// All pairs that are not listed.
const ALL_PAIRS: &str = "all-pairs";

/// What the tasks run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Devices {
    /// A GPU.
    Gpu,
    /// The cores of this machine.
    Cpu,
}

/// A command that is measured.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Task {
    /// Its name in the rows.
    pub name: String,
    /// Training or service.
    pub kind: TaskKind,
    /// What to run.
    pub command: Command,
    /// Working directory, relative to the plan.
    #[serde(default)]
    pub workdir: PathBuf,
    /// Variables added to the environment.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Batch sizes; the first is the default.
    pub batches: Vec<u32>,
    /// Numbers of SMs to be confined to, in addition to the whole GPU.
    #[serde(default)]
    pub sms: Vec<u32>,
}

/// Tasks that run side by side.
#[derive(Clone, Debug, PartialEq)]
struct Set {
    tasks: Vec<usize>,
    batches: Vec<u32>,
    splits: Splits,
}

/// All fields but tasks and sets.
#[derive(Clone, Debug, PartialEq, Deserialize)]
struct Rest {
    #[serde(default)]
    splits: Splits,
    #[serde(default = "usual_bound")]
    bound: f64,
    #[serde(default = "usual_tries")]
    tries: usize,
    #[serde(default = "usual_seconds")]
    seconds: f64,
    #[serde(default = "usual_settle")]
    settle: f64,
    #[serde(default = "once")]
    rounds: u32,
    #[serde(default)]
    mps: Option<bool>,
    #[serde(default)]
    devices: Option<Devices>,
    #[serde(default)]
    sms: Option<u32>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    #[serde(default = "usual_starting")]
    starting: usize,
    #[serde(default = "usual_start_within")]
    start_within: f64,
}

fn usual_bound() -> f64 {
    1.5
}
fn usual_tries() -> usize {
    6
}
fn usual_seconds() -> f64 {
    1.5
}
fn usual_settle() -> f64 {
    0.5
}
fn once() -> u32 {
    1
}
fn usual_starting() -> usize {
    4
}
fn usual_start_within() -> f64 {
    300.0
}

/// A plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The commands.
    pub tasks: Vec<Task>,
    sets: Vec<Set>,
    /// The largest accepted slowdown of a task, where splits are searched for.
    pub bound: f64,
    /// Most splits that are tried for a set in a search.
    pub tries: usize,
    /// Seconds of each measurement.
    pub seconds: f64,
    /// Seconds for which tasks settle before each measurement.
    pub settle: f64,
    /// How often everything is measured, one round after the other.
    pub rounds: u32,
    /// Whether tasks share the GPU through MPS; `None` = yes.
    pub mps: Option<bool>,
    /// What the tasks run on; `None` = a GPU if there is one.
    pub devices: Option<Devices>,
    /// SMs of the GPU, if the plan gives them.
    pub sms: Option<u32>,
    /// Variables added to the environment of all tasks.
    pub env: BTreeMap<String, String>,
    /// Number of tasks that start at the same time.
    pub starting: usize,
    /// Seconds within which a task has to be ready.
    pub start_within_s: f64,
    at: Place,
}

/// A task in a measurement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Index of the task.
    pub task: usize,
    /// Index among the processes of the task: a task beside itself has several.
    pub copy: usize,
    /// Its batch size.
    pub batch: u32,
    /// The SM range that it is confined to; `None` = the whole GPU.
    pub seat: Option<SmRange>,
    /// Whether it has priority over the others.
    pub first: bool,
}

/// One measurement: some tasks at the same time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// The tasks.
    pub members: Vec<Member>,
    /// The fields of its row that identify it among all items.
    pub identity: Vec<(&'static str, serde_json::Value)>,
    /// Whether it goes into the file of services.
    pub of_services: bool,
    /// The set that it measures without confinement, if splits of that set are to be searched for.
    pub searched: Option<usize>,
    /// Its round.
    pub round: u32,
}

impl Item {
    fn in_round(mut self, round: u32) -> Self {
        if round > 0 {
            self.identity.push(("round", json!(round)));
        }
        self.round = round;
        self
    }
}

impl Plan {
    /// Reads a plan. Paths in it are relative to the folder of the file.
    pub fn read(text: &str, file: &Path) -> Result<Self, JobFileError> {
        let hint = "`roommate profile measure --example` shows every field";
        let at = Place { file: file.display().to_string(), job: None, hint };
        let value = job_file::parse(text, &at)?;
        if value.as_mapping().is_none() {
            let found = shown(&value);
            return Err(at.wrong(format!("expected fields such as `tasks:`, found {found}")));
        }
        job_file::check_fields(&value, &[FIELDS], &at)?;
        let Some(Value::Sequence(entries)) = value.get("tasks") else {
            return Err(at.wrong("tasks: expected a list of commands to measure".into()));
        };
        let folder = file.parent().map_or_else(PathBuf::new, Path::to_path_buf);
        let mut tasks: Vec<Task> = Vec::new();
        for (i, entry) in entries.iter().enumerate() {
            let at = Place { file: format!("{}, task {}", at.file, i + 1), ..at.clone() };
            job_file::check_fields(entry, &[OF_TASK], &at)?;
            let mut task: Task =
                yaml_serde::from_value(entry.clone()).map_err(|e| at.wrong(plain(&e)))?;
            task.workdir = folder.join(&task.workdir);
            task.check().map_err(|what| at.wrong(what))?;
            if tasks.iter().any(|t| t.name == task.name) {
                return Err(at.wrong(format!("name: there are two tasks {:?}", task.name)));
            }
            tasks.push(task);
        }
        if tasks.is_empty() {
            return Err(at.wrong("tasks: there is nothing to measure".into()));
        }
        let mut rest = value.clone();
        if let Some(fields) = rest.as_mapping_mut() {
            fields.remove("tasks");
            fields.remove("sets");
        }
        let rest: Rest = yaml_serde::from_value(rest).map_err(|e| at.wrong(plain(&e)))?;
        rest.check().map_err(|what| at.wrong(what))?;
        let sets = sets(value.get("sets"), &tasks, &rest.splits, &at)?;
        Ok(Self {
            tasks,
            sets,
            bound: rest.bound,
            tries: rest.tries,
            seconds: rest.seconds,
            settle: rest.settle,
            rounds: rest.rounds,
            mps: rest.mps,
            devices: rest.devices,
            sms: rest.sms,
            env: rest.env,
            starting: rest.starting,
            start_within_s: rest.start_within,
            at,
        })
    }

    /// All measurements on a device with `all` SMs, in an order in which few tasks have to be
    /// resumed: each task alone, then the sets; then the same again for each further round.
    pub fn items(&self, all: u32) -> Result<Vec<Item>, JobFileError> {
        let items = self.round(all)?;
        let rounds = 0..self.rounds;
        Ok(rounds.flat_map(|n| items.iter().cloned().map(move |i| i.in_round(n))).collect())
    }

    /// A set whose splits are searched for, in this way.
    pub fn tried(&self, set: usize, way: &Way, all: u32, round: u32) -> Result<Item, JobFileError> {
        self.split(&self.sets[set], &way.into(), all).map(|i| i.in_round(round))
    }

    /// Names and batch sizes of the tasks of a set.
    pub fn members(&self, set: usize) -> impl Iterator<Item = (&str, u32)> {
        let Set { tasks, batches, .. } = &self.sets[set];
        tasks.iter().map(|t| self.tasks[*t].name.as_str()).zip(batches.iter().copied())
    }

    fn round(&self, all: u32) -> Result<Vec<Item>, JobFileError> {
        let mut items = Vec::new();
        for (i, task) in self.tasks.iter().enumerate() {
            let wrong = |what| self.at.wrong(format!("task {:?}: sms: {what}", task.name));
            let mut parts = task.sms.clone();
            parts.retain(|sms| *sms != all);
            parts.iter().try_for_each(|sms| group(*sms, all)).map_err(wrong)?;
            for batch in &task.batches {
                items.push(self.solo(i, *batch, all, None));
                for sms in &parts {
                    let seat = SmRange { first: 0, sms: *sms as u16 };
                    items.push(self.solo(i, *batch, *sms, Some(seat)));
                }
            }
        }
        for (i, set) in self.sets.iter().enumerate() {
            let free = self.set(set, all, None, None);
            match &set.splits {
                Splits::Search => items.push(Item { searched: Some(i), ..free }),
                Splits::These(splits) => {
                    items.push(free);
                    for split in splits {
                        items.push(self.split(set, split, all)?);
                    }
                }
            }
        }
        Ok(items)
    }

    fn split(&self, set: &Set, split: &Split, all: u32) -> Result<Item, JobFileError> {
        let names: Vec<&str> = set.tasks.iter().map(|t| self.tasks[*t].name.as_str()).collect();
        let wrong = |what| self.at.wrong(format!("splits of {}: {what}", names.join(" + ")));
        let seats = split.seats(set.tasks.len(), all).map_err(wrong)?;
        let seats = seats.iter().any(Option::is_some).then_some(&seats[..]);
        Ok(self.set(set, all, seats, split.first()))
    }

    /// The smallest range that any task is ever confined to; 0 = none is.
    pub fn least_sms(&self, all: u32) -> Result<u32, JobFileError> {
        let items = self.items(all)?;
        let seats = items.iter().flat_map(|i| &i.members).filter_map(|m| m.seat);
        let searched = items.iter().any(|i| i.searched.is_some()).then_some(search::LEAST);
        Ok(seats.map(|s| u32::from(s.sms)).chain(searched).min().unwrap_or(0))
    }

    /// Whether any task is to be confined.
    pub fn splits_anything(&self) -> bool {
        self.tasks.iter().any(|t| !t.sms.is_empty())
            || self.sets.iter().any(|s| s.splits != Splits::default())
    }

    /// An error of the plan.
    pub fn wrong(&self, what: String) -> JobFileError {
        self.at.wrong(what)
    }

    fn solo(&self, task: usize, batch: u32, sms: u32, seat: Option<SmRange>) -> Item {
        let Task { name, kind, .. } = &self.tasks[task];
        Item {
            members: vec![Member { task, copy: 0, batch, seat, first: false }],
            identity: vec![
                ("kind", json!(kind)),
                ("name", json!(name)),
                ("batch", json!(batch)),
                ("sms", json!(sms)),
            ],
            of_services: false,
            searched: None,
            round: 0,
        }
    }

    fn set(
        &self,
        set: &Set,
        all: u32,
        seats: Option<&[Option<SmRange>]>,
        first: Option<usize>,
    ) -> Item {
        let member = |(i, task): (usize, &usize)| Member {
            task: *task,
            copy: set.tasks[..i].iter().filter(|t| *t == task).count(),
            batch: set.batches[i],
            seat: seats.and_then(|s| s[i]),
            first: first == Some(i),
        };
        let members: Vec<Member> = set.tasks.iter().enumerate().map(member).collect();
        let names: Vec<&str> = set.tasks.iter().map(|t| self.tasks[*t].name.as_str()).collect();
        let of_services = set.tasks.iter().any(|t| self.tasks[*t].kind == TaskKind::Serve);
        let has = |seat: &Option<SmRange>| seat.map_or(all as u16, |s| s.sms);
        let sms: Option<Vec<u16>> = seats.map(|s| s.iter().map(has).collect());
        // Rows of services always contain the SMs of each task.
        let whole = || vec![all as u16; set.tasks.len()];
        let sms = if of_services { Some(sms.unwrap_or_else(whole)) } else { sms };
        let mut identity = match names[..] {
            [a, b] => vec![
                ("k", json!(if of_services { "tc" } else { "tt" })),
                ("a", json!(a)),
                ("batch_a", json!(set.batches[0])),
                ("b", json!(b)),
                ("batch_b", json!(set.batches[1])),
            ],
            _ => {
                vec![("k", json!("ttt")), ("tasks", json!(names)), ("batches", json!(set.batches))]
            }
        };
        match (&sms, names.len()) {
            (Some(sms), 2) => {
                identity.extend([("sms_a", json!(sms[0])), ("sms_b", json!(sms[1]))]);
            }
            (Some(sms), _) => identity.push(("sms", json!(sms))),
            (None, _) => {}
        }
        identity.extend(first.map(|i| ("first", json!(i))));
        Item { members, identity, of_services, searched: None, round: 0 }
    }
}

impl Task {
    fn check(&self) -> Result<(), String> {
        if self.name.trim().is_empty() {
            return Err("name: expected a name".into());
        }
        let words = self.command.words();
        if words.first().is_none_or(|w| w.trim().is_empty())
            || words.last().is_some_and(|w| w.trim().is_empty())
        {
            return Err("command: there is nothing to run".into());
        }
        if self.batches.is_empty() || self.batches.contains(&0) {
            return Err("batches: expected a list of batch sizes of at least 1".into());
        }
        if has_twice(&self.batches) || has_twice(&self.sms) {
            return Err("the same batch size, or number of SMs, is listed twice".into());
        }
        Ok(())
    }
}

fn has_twice(list: &[u32]) -> bool {
    list.iter().enumerate().any(|(i, v)| list[..i].contains(v))
}

impl Rest {
    fn check(&self) -> Result<(), String> {
        let within = |name: &str, v: f64, least: f64, most: f64| {
            let good = (least..=most).contains(&v);
            if good {
                Ok(())
            } else {
                Err(format!("{name}: expected {least} to {most}, found {v}"))
            }
        };
        within("bound", self.bound, 1.0, 1000.0)?;
        within("tries", self.tries as f64, 1.0, 100.0)?;
        within("seconds", self.seconds, 0.1, 600.0)?;
        within("settle", self.settle, 0.0, 600.0)?;
        within("start_within", self.start_within, 1.0, 3600.0)?;
        within("rounds", f64::from(self.rounds), 1.0, 1000.0)?;
        within("starting", self.starting as f64, 1.0, 1000.0)?;
        match self.sms {
            Some(0) => Err("sms: expected the number of SMs of the GPU, found 0".into()),
            _ => Ok(()),
        }
    }
}

/// A set as written in the file.
#[derive(Deserialize)]
struct SetForm {
    tasks: Vec<String>,
    batches: Option<Vec<u32>>,
    splits: Option<Splits>,
}

fn sets(
    value: Option<&Value>,
    tasks: &[Task],
    splits: &Splits,
    at: &Place,
) -> Result<Vec<Set>, JobFileError> {
    let entries = match value {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Sequence(entries)) => entries.clone(),
        Some(one @ Value::String(_)) => vec![one.clone()],
        Some(other) => {
            return Err(at.wrong(format!("sets: expected a list, found {}", shown(other))));
        }
    };
    let mut sets: Vec<Set> = Vec::new();
    let mut all_pairs = false;
    for (i, entry) in entries.iter().enumerate() {
        let at = Place { file: format!("{}, set {}", at.file, i + 1), ..at.clone() };
        let form = match entry {
            Value::String(word) if word == ALL_PAIRS => {
                all_pairs = true;
                continue;
            }
            Value::Sequence(_) => {
                let tasks =
                    yaml_serde::from_value(entry.clone()).map_err(|e| at.wrong(plain(&e)))?;
                SetForm { tasks, batches: None, splits: None }
            }
            Value::Mapping(_) => {
                job_file::check_fields(entry, &[OF_SET], &at)?;
                yaml_serde::from_value(entry.clone()).map_err(|e| at.wrong(plain(&e)))?
            }
            other => {
                let found = shown(other);
                let what = format!("expected names of tasks or `{ALL_PAIRS}`, found {found}");
                return Err(at.wrong(what));
            }
        };
        sets.push(form.settle(tasks, splits, &at)?);
    }
    if all_pairs {
        let pairs = (0..tasks.len()).flat_map(|a| (a + 1..tasks.len()).map(move |b| (a, b)));
        for (a, b) in pairs {
            // Training first.
            let (a, b) = if tasks[a].kind <= tasks[b].kind { (a, b) } else { (b, a) };
            let known = |s: &Set| s.tasks[..] == [a, b] || s.tasks[..] == [b, a];
            if tasks[a].kind == TaskKind::Serve || sets.iter().any(known) {
                continue;
            }
            let batches = vec![tasks[a].batches[0], tasks[b].batches[0]];
            let splits = splits.for_set(2, usize::from(tasks[b].kind == TaskKind::Serve));
            sets.push(Set { tasks: vec![a, b], batches, splits });
        }
    }
    Ok(sets)
}

impl SetForm {
    fn settle(self, tasks: &[Task], splits: &Splits, at: &Place) -> Result<Set, JobFileError> {
        let find = |name: &String| {
            let names = tasks.iter().map(|t| t.name.as_str());
            let found = tasks.iter().position(|t| t.name == *name);
            found.ok_or_else(|| at.wrong_with(format!("no task {name:?}"), meant(name, names)))
        };
        let members = self.tasks.iter().map(find).collect::<Result<Vec<_>, _>>()?;
        let services = members.iter().filter(|t| tasks[**t].kind == TaskKind::Serve).count();
        let good = match (members.len(), services) {
            (2 | 3, 0) => true,
            (2, 1) => tasks[members[1]].kind == TaskKind::Serve,
            _ => false,
        };
        if !good {
            let what = "expected two or three training tasks, or a training task and a service";
            return Err(at.wrong(format!("{what}, found {}", self.tasks.join(", "))));
        }
        let usual = || members.iter().map(|t| tasks[*t].batches[0]).collect();
        let batches = self.batches.unwrap_or_else(usual);
        if batches.len() != members.len() || batches.contains(&0) {
            return Err(at.wrong("batches: expected a batch size for each task".into()));
        }
        let mut each = batches.iter().zip(&members);
        if let Some((batch, task)) = each.find(|(b, t)| !tasks[**t].batches.contains(b)) {
            let name = &tasks[*task].name;
            let what = format!("batches: {name:?} is not measured alone at {batch}");
            let hint =
                format!("add {batch} to the batches of the task: sets are compared with it alone");
            return Err(at.wrong_with(what, hint));
        }
        if self.splits == Some(Splits::Search) && services > 0 {
            let what = "splits: they are searched for only in sets of training tasks";
            return Err(at.wrong(what.into()));
        }
        if let Some(Splits::These(these)) = &self.splits
            && services > 0
            && these.iter().any(|s| s.first().is_some())
        {
            let what = "splits: priority is measured only in sets of training tasks";
            return Err(at.wrong(what.into()));
        }
        let splits = self.splits.unwrap_or_else(|| splits.for_set(members.len(), services));
        Ok(Set { tasks: members, batches, splits })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Plan, JobFileError> {
        Plan::read(text, Path::new("dir/plan.yaml"))
    }

    fn outcome(text: &str) -> String {
        match read(text).and_then(|plan| plan.items(132)) {
            Ok(items) => format!("{} measurements", items.len()),
            Err(e) => format!("{e} | {}", e.hint().unwrap_or_default()),
        }
    }

    const TWO: &str = "tasks:
- {name: a, kind: train, command: one, batches: [8, 4], sms: [24]}
- {name: b, kind: train, command: [two], batches: [2]}
- {name: s, kind: serve, command: [three], batches: [1]}
";

    fn row(item: &Item) -> String {
        let fields = item.identity.iter().map(|(name, value)| format!("{name}={value}"));
        fields.collect::<Vec<_>>().join(" ").replace('"', "")
    }

    #[test]
    fn the_example_shows_every_field_and_reads() {
        let plan = read(EXAMPLE).unwrap();
        assert_eq!(plan.tasks[0].workdir, Path::new("dir/."));
        // 3 batches on the whole GPU and three ranges, 2 of bert; a set beside itself and its two
        // splits; the listed set with its splits; no pair is left for `all-pairs`.
        assert_eq!(plan.items(132).unwrap().len(), 3 * 4 + 2 + 3 + 3);
        assert_eq!(plan.least_sms(132).unwrap(), 24);
        for field in FIELDS {
            let shown = |l: &str| l.trim_start_matches("# ").starts_with(&format!("{field}:"));
            assert!(EXAMPLE.lines().any(shown), "{field} is not in the example");
        }
    }

    #[test]
    fn items_identify_their_rows() {
        let text = format!(
            "{TWO}sets: [all-pairs, [a, a, b], {{tasks: [b, a], splits: [[40, 92]]}}]\n\
             splits: [48]\n"
        );
        let items = read(&text).unwrap().items(132).unwrap();
        let rows: Vec<String> = items.iter().map(row).collect();
        assert_eq!(
            rows,
            [
                "kind=train name=a batch=8 sms=132",
                "kind=train name=a batch=8 sms=24",
                "kind=train name=a batch=4 sms=132",
                "kind=train name=a batch=4 sms=24",
                "kind=train name=b batch=2 sms=132",
                "kind=serve name=s batch=1 sms=132",
                "k=ttt tasks=[a,a,b] batches=[8,8,2]",
                "k=ttt tasks=[a,a,b] batches=[8,8,2] sms=[48,84,84]",
                "k=tt a=b batch_a=2 b=a batch_b=8",
                "k=tt a=b batch_a=2 b=a batch_b=8 sms_a=40 sms_b=92",
                "k=tc a=a batch_a=8 b=s batch_b=1 sms_a=132 sms_b=132",
                "k=tc a=a batch_a=8 b=s batch_b=1 sms_a=48 sms_b=84",
                "k=tc a=b batch_a=2 b=s batch_b=1 sms_a=132 sms_b=132",
                "k=tc a=b batch_a=2 b=s batch_b=1 sms_a=48 sms_b=84",
            ]
        );
        let triple = &items[7].members;
        assert_eq!(
            triple.iter().map(|m| (m.task, m.copy)).collect::<Vec<_>>(),
            [(0, 0), (0, 1), (1, 0)]
        );
        assert_eq!(triple[2].seat, Some(SmRange { first: 48, sms: 84 }));
    }

    #[test]
    fn splits_can_be_left_to_a_search() {
        let text = format!(
            "{TWO}sets: [[a, b], [a, a, b], {{tasks: [b, b], splits: []}}, all-pairs]\n\
             splits: search\nrounds: 2\n"
        );
        let plan = read(&text).unwrap();
        let items = plan.items(132).unwrap();
        let searched: Vec<(Option<usize>, u32)> =
            items.iter().filter(|i| i.members.len() > 1).map(|i| (i.searched, i.round)).collect();
        // Sets with services are not split.
        let [none, round] = [(None, 0), (None, 1)];
        assert_eq!(
            searched,
            [
                (Some(0), 0),
                (Some(1), 0),
                none,
                none,
                none,
                (Some(0), 1),
                (Some(1), 1),
                round,
                round,
                round
            ]
        );
        assert_eq!(plan.least_sms(132).unwrap(), 24, "a alone");
        assert_eq!(plan.members(1).collect::<Vec<_>>(), [("a", 8), ("a", 8), ("b", 2)]);
        let way = |first, sms: &[u32]| Way { first, sms: Some(sms.to_vec()) };
        let tried = |set, way: &Way, round| {
            let item = plan.tried(set, way, 132, round).unwrap();
            let seats = item.members.iter().map(|m| m.seat.map(|s| (s.first, s.sms))).collect();
            (row(&item), seats)
        };
        // One task confined, one not.
        let seats: Vec<Option<(u16, u16)>> = vec![Some((0, 88)), None];
        let what = "k=tt a=a batch_a=8 b=b batch_b=2 sms_a=88 sms_b=132 round=1";
        assert_eq!(tried(0, &way(None, &[88, 132]), 1), (what.into(), seats));
        // Two tasks share a range, independently of their order.
        let seats = vec![Some((48, 84)), Some((48, 84)), Some((0, 48))];
        let what = "k=ttt tasks=[a,a,b] batches=[8,8,2] sms=[84,84,48]";
        assert_eq!(tried(1, &way(None, &[84, 84, 48]), 0), (what.into(), seats));
        // One has priority, and another is confined or not.
        let what = "k=tt a=a batch_a=8 b=b batch_b=2 sms_a=132 sms_b=96 first=0";
        let seats = vec![None, Some((0, 96))];
        assert_eq!(tried(0, &way(Some(0), &[132, 96]), 0), (what.into(), seats));
        let what = "k=ttt tasks=[a,a,b] batches=[8,8,2] first=2";
        assert_eq!(tried(1, &Way { first: Some(2), sms: None }, 0), (what.into(), vec![None; 3]));
        let item = plan.tried(1, &Way { first: Some(2), sms: None }, 132, 0).unwrap();
        assert_eq!(item.members.iter().map(|m| m.first).collect::<Vec<_>>(), [false, false, true]);
    }

    #[test]
    fn mistakes_are_reported_with_a_hint() {
        let check =
            |text: &str, expect: &str| assert_eq!(outcome(text), format!("dir/plan.yaml{expect}"));
        let example = "`roommate profile measure --example` shows every field";
        let with = |more: &str| format!("{TWO}{more}");
        check(
            "just text",
            &format!(": expected fields such as `tasks:`, found just text | {example}"),
        );
        check("task: []", r#": unknown field "task" | did you mean "tasks"?"#);
        check("tasks: []", &format!(": tasks: there is nothing to measure | {example}"));
        check(
            "tasks: [{name: a, kind: train, comand: x, batches: [1]}]",
            r#", task 1: unknown field "comand" | did you mean "command"?"#,
        );
        check(
            "tasks: [{name: a, kind: train, command: x, batches: []}]",
            &format!(", task 1: batches: expected a list of batch sizes of at least 1 | {example}"),
        );
        check(&with("sets: [[a, c]]"), r#", set 1: no task "c" | did you mean "a"?"#);
        check(
            &with("sets: [[a, s, s]]"),
            &format!(
                ", set 1: expected two or three training tasks, or a training task and a service, \
                 found a, s, s | {example}"
            ),
        );
        check(
            &with("sets: [{tasks: [a, b], batches: [16, 2]}]"),
            ", set 1: batches: \"a\" is not measured alone at 16 | add 16 to the batches of the \
             task: sets are compared with it alone",
        );
        check(
            &with("sets: [[a, b]]\nsplits: [50]"),
            &format!(": splits of a + b: expected a multiple of 8 up to 132, found 50 | {example}"),
        );
        check(
            &with("sets: [{tasks: [a, b], splits: [[80, 80]]}]"),
            &format!(": splits of a + b: 160 SMs together, of 132 | {example}"),
        );
        check(
            &with("sets: [{tasks: [a, b], splits: [{first: 2}]}]"),
            &format!(": splits of a + b: first: expected an index below 2, found 2 | {example}"),
        );
        check(
            &with("sets: [{tasks: [a, s], splits: [{first: 0}]}]"),
            &format!(
                ", set 1: splits: priority is measured only in sets of training tasks | {example}"
            ),
        );
        check(
            &with("sets: [[a, b]]\nsplits: serch"),
            &format!(": splits: expected a list or `search`, found serch | {example}"),
        );
        check(
            &with("sets: [{tasks: [a, s], splits: search}]"),
            &format!(
                ", set 1: splits: they are searched for only in sets of training tasks | {example}"
            ),
        );
        check(&with("seconds: 0"), &format!(": seconds: expected 0.1 to 600, found 0 | {example}"));
    }
}
