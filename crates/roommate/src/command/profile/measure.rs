//! `roommate profile measure`: measures tasks alone and colocated, as listed in a plan.

use crate::atomic::AtomicFile;
use crate::cli::Measure;
use crate::command::submit;
use crate::{ANSWER_NO, console, measurements, table};
use anyhow::Context;
use roommate_agent::AgentError;
use roommate_agent::process::{THIS_PROGRAM, signal};
use roommate_agent::profiling::bench_setup::BenchSetup;
use roommate_agent::profiling::plan::{EXAMPLE, Item, Member, Plan};
use roommate_agent::profiling::{Bench, Trouble, key, row};
use roommate_core::measurement::advice::{self, Configuration, Constraints, Way, Workload};
use roommate_core::measurement::rows::TaskKind;
use roommate_core::measurement::search::Search;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

pub(super) fn run(args: &Measure) -> anyhow::Result<ExitCode> {
    let (Some(plan), Some(out)) = (&args.plan, &args.out) else {
        console::print(EXAMPLE)?;
        return Ok(ExitCode::SUCCESS);
    };
    let stop = signal::end_wanted()?;
    let text = text_of(plan)?;
    let plan = Plan::read(&text, &submit::absolute(plan)?).map_err(AgentError::from)?;
    let folder = tempfile::Builder::new()
        .prefix("roommate-")
        .tempdir()
        .context("could not make a folder")?;
    let setup = BenchSetup::of(&plan, folder.path())?;
    let items = plan.items(setup.sms).map_err(AgentError::from)?;
    let files = Files::open(out, &items, args.again)?;
    let known = items.iter().filter(|i| files.has(i)).count();
    if known > 0 {
        console::say(&format!("{known} of {} are measured already", items.len()));
    }
    let mut work = Work { plan: &plan, sms: setup.sms, files, tried: BTreeSet::new() };
    let mut left: Vec<&Item> = Vec::new();
    for item in &items {
        if !work.files.has(item) || work.next(item)?.is_some() {
            left.push(item);
        }
    }
    if left.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    console::say(&format!("on {}", setup.device));
    let program = Path::new(THIS_PROGRAM);
    let mut bench = Bench::open(&plan, setup, folder.path(), program, &stop)?;
    let done = work.all(&mut bench, &left);
    bench.close();
    let Done { rows, failed } = done?;
    let rows = table::count(rows, "row");
    let names: Vec<String> = work.files.paths().map(|p| p.display().to_string()).collect();
    console::say(&format!("{rows} more in {}", names.join(" and ")));
    if failed > 0 {
        let what = table::count(failed, "measurement");
        console::say(&format!(
            "{what} failed: see `error` in the rows; the same command tries again"
        ));
        return Ok(ExitCode::from(ANSWER_NO));
    }
    Ok(ExitCode::SUCCESS)
}

fn text_of(path: &Path) -> anyhow::Result<String> {
    fs::read_to_string(path).map_err(|e| {
        let what = format!("could not read {}: {e}", measurements::quoted(path));
        console::advise(what, "`roommate profile measure --example` prints a plan to begin with")
    })
}

/// The plan to measure, and the output files.
struct Work<'a> {
    plan: &'a Plan,
    sms: u32,
    files: Files,
    /// Keys of the ways that were tried, with or without success.
    tried: BTreeSet<String>,
}

/// Number of measurements that succeeded and failed.
#[derive(Clone, Copy, Default)]
struct Done {
    rows: u64,
    failed: u64,
}

impl Work<'_> {
    /// Measures all remaining items.
    fn all(&mut self, bench: &mut Bench<'_>, left: &[&Item]) -> anyhow::Result<Done> {
        bench
            .start(left.iter().copied(), |name, started| match started {
                Ok(s) => console::say(&format!("{name}: ready after {s:.1} s")),
                Err(how) => console::say(&format!("{name}: {how}")),
            })
            .map_err(stopped)?;
        let mut done = Done::default();
        let began = Instant::now();
        for (i, item) in left.iter().enumerate() {
            if !self.files.has(item) {
                self.one(bench, item, left.len() - i, began, &mut done)?;
            }
            while let Some(next) = self.next(item)? {
                self.tried.insert(next.key());
                self.one(bench, &next, left.len() - i, began, &mut done)?;
            }
        }
        Ok(done)
    }

    fn one(
        &mut self,
        bench: &mut Bench<'_>,
        item: &Item,
        left: usize,
        began: Instant,
        done: &mut Done,
    ) -> anyhow::Result<()> {
        let so_far = done.rows + done.failed;
        let usual = self.plan.settle + self.plan.seconds + 0.1;
        let each = if so_far == 0 { usual } else { began.elapsed().as_secs_f64() / so_far as f64 };
        let eta = table::figure(Some(each * left as f64), "s");
        let (now, all) = (so_far + 1, so_far + left as u64);
        console::say(&format!("{now} of {all}, {eta} left: {}", words(item)));
        let measured = match bench.measure(item) {
            Ok(measured) => Ok(measured),
            Err(Trouble::Item(what)) => {
                console::say(&format!("  {what}"));
                Err(what)
            }
            Err(other) => return Err(stopped(other)),
        };
        *(if measured.is_ok() { &mut done.rows } else { &mut done.failed }) += 1;
        self.files.add(item, &row(item, &measured), measured.is_ok())
    }

    /// The way to measure next for the set of this item, if its splits are searched. After the
    /// first round, the best ways are measured again.
    fn next(&self, item: &Item) -> anyhow::Result<Option<Item>> {
        let (Some(set), true) = (item.searched, self.files.has(item)) else { return Ok(None) };
        let Plan { bound, tries, mps, .. } = *self.plan;
        // Time slices of the driver know no priority.
        let search = Search { gpu: self.sms, bound, tries, priority: mps.unwrap_or(true) };
        // The members of a configuration are sorted by name.
        let mut order: Vec<(usize, (&str, u32))> = self.plan.members(set).enumerate().collect();
        order.sort_by_key(|(_, task)| *task);
        let configurations = self.files.configurations(order.iter().map(|(_, task)| *task))?;
        let as_item = |Way { first, sms }: &Way| {
            let in_plan = |parts: &Vec<u32>| {
                let mut each = vec![0; parts.len()];
                for ((at, _), sms) in order.iter().zip(parts) {
                    each[*at] = *sms;
                }
                each
            };
            let way = Way { first: first.map(|i| order[i].0), sms: sms.as_ref().map(in_plan) };
            self.plan.tried(set, &way, self.sms, item.round).map_err(AgentError::from)
        };
        let proposed: Vec<Way> = if item.round == 0 {
            search.next(&configurations).into_iter().collect()
        } else {
            search.again(&configurations).take(LOOKED_AT_AGAIN).cloned().collect()
        };
        for way in proposed {
            let next = as_item(&way)?;
            if !self.files.has(&next) && !self.tried.contains(&next.key()) {
                return Ok(Some(next));
            }
        }
        Ok(None)
    }
}

fn stopped(trouble: Trouble) -> anyhow::Error {
    match trouble {
        Trouble::Agent(e) => e.into(),
        other => console::advise(
            format!("could not measure everything: {other}"),
            "what was measured is kept; the same command goes on with the rest",
        ),
    }
}

/// Number of ways found by the search that are measured again in later rounds.
const LOOKED_AT_AGAIN: usize = 2;

/// Description of an item for messages.
fn words(item: &Item) -> String {
    let field = |name: &str| item.identity.iter().find(|(n, _)| *n == name).map(|(_, v)| v);
    let text = |v: &Value| v.as_str().map_or_else(|| v.to_string(), String::from);
    let named =
        |name: &str, batch: &str| Some(format!("{}@{}", text(field(name)?), text(field(batch)?)));
    let tasks = match (named("name", "batch"), named("a", "batch_a"), named("b", "batch_b")) {
        (Some(one), _, _) => one,
        (_, Some(a), Some(b)) => format!("{a} + {b}"),
        _ => {
            let list = |name: &str| field(name).and_then(Value::as_array).cloned();
            let (names, batches) = (list("tasks").unwrap_or_default(), list("batches"));
            let each = names.iter().zip(batches.iter().flatten());
            each.map(|(n, b)| format!("{}@{b}", text(n))).collect::<Vec<_>>().join(" + ")
        }
    };
    let seat = |m: &Member| m.seat.map_or("all".to_string(), |s| s.sms.to_string());
    let seats: Vec<String> = item.members.iter().map(seat).collect();
    let confined = item.members.iter().any(|m| m.seat.is_some());
    let parts = if confined { format!(" on {} SMs", seats.join(" + ")) } else { String::new() };
    let first = item.members.iter().position(|m| m.first);
    let parts = parts + &first.map_or_else(String::new, |i| format!(", number {} first", i + 1));
    let round = field("round").and_then(Value::as_u64);
    let round = round.map_or_else(String::new, |n| format!(", round {}", n + 1));
    format!("{tasks}{parts}{round}")
}

/// The output files, and the keys of the rows in them.
struct Files {
    /// Everything except services beside training.
    plain: (PathBuf, Option<File>),
    /// Services beside training, and the rows of services alone to which those are compared.
    services: (PathBuf, Option<File>),
    known: BTreeSet<String>,
}

impl Files {
    /// Reads existing rows. Failed rows of these items, and with `again` all rows of these items,
    /// are removed.
    fn open(prefix: &Path, items: &[Item], again: bool) -> anyhow::Result<Self> {
        let with = |end: &str| {
            let mut name = prefix.as_os_str().to_owned();
            name.push(end);
            PathBuf::from(name)
        };
        let mut files = Self {
            plain: (with(".jsonl"), None),
            services: (with("-services.jsonl"), None),
            known: BTreeSet::new(),
        };
        let wanted = Wanted::of(items);
        let mut known = BTreeSet::new();
        for path in files.paths() {
            known.extend(tidy(path, &wanted, again)?);
        }
        files.known = known;
        Ok(files)
    }

    fn paths(&self) -> impl Iterator<Item = &PathBuf> {
        [&self.plain, &self.services]
            .into_iter()
            .filter(|(p, file)| file.is_some() || p.exists())
            .map(|(p, _)| p)
    }

    fn has(&self, item: &Item) -> bool {
        self.known.contains(&item.key())
    }

    /// Measured configurations of the first round for a set of training tasks, which is sorted by
    /// name and batch size.
    fn configurations<'a>(
        &self,
        set: impl Iterator<Item = (&'a str, u32)>,
    ) -> anyhow::Result<Vec<Configuration>> {
        let task = |(name, batch): (&str, u32)| Workload {
            name: name.into(),
            batch,
            kind: TaskKind::Train,
        };
        let set: Vec<Workload> = set.map(task).collect();
        let sessions = measurements::sessions(&self.plain.0)?;
        // Only the measurements are used here, not the choice, so nothing is constrained.
        let constraints = Constraints { bound: 1.0, least: 0.0, loss: 0.0 };
        let all = advice::advise(sessions.get(..1).unwrap_or_default(), constraints);
        Ok(all.into_iter().find(|a| a.set == set).map(|a| a.configurations).unwrap_or_default())
    }

    fn add(&mut self, item: &Item, row: &str, good: bool) -> anyhow::Result<()> {
        let serves = item.identity.iter().any(|(n, v)| *n == "kind" && v == "serve");
        if !item.of_services {
            append(&mut self.plain, row)?;
        }
        if item.of_services || (serves && good) {
            append(&mut self.services, row)?;
        }
        if good {
            self.known.insert(item.key());
        }
        Ok(())
    }
}

/// Keys of the rows that a plan covers.
struct Wanted {
    items: BTreeSet<String>,
    /// Sets whose partitions are searched.
    sets: BTreeSet<String>,
}

impl Wanted {
    fn of(items: &[Item]) -> Self {
        let searched = items.iter().filter(|i| i.searched.is_some());
        Self {
            items: items.iter().map(Item::key).collect(),
            sets: searched.map(Item::key).collect(),
        }
    }

    fn has(&self, row: &Value) -> bool {
        let mut set = row.clone();
        if let Some(fields) = set.as_object_mut() {
            fields.retain(|name, _| !name.starts_with("sms") && name != "first");
        }
        self.items.contains(&key(row)) || self.sets.contains(&key(&set))
    }
}

fn append((path, file): &mut (PathBuf, Option<File>), row: &str) -> anyhow::Result<()> {
    let problem = || format!("could not write {}", measurements::quoted(path));
    if file.is_none() {
        *file =
            Some(OpenOptions::new().create(true).append(true).open(&*path).with_context(problem)?);
    }
    let Some(file) = file else { unreachable!("it was just opened") };
    file.write_all(format!("{row}\n").as_bytes()).with_context(problem)
}

/// Removes outdated rows from a file; returns the keys of the valid rows that remain.
fn tidy(path: &Path, wanted: &Wanted, again: bool) -> anyhow::Result<BTreeSet<String>> {
    let problem = || format!("could not read measurements {}", measurements::quoted(path));
    let text = fs::read_to_string(path).with_context(problem)?;
    let mut known = BTreeSet::new();
    let mut kept = String::new();
    for (i, line) in text.split_inclusive('\n').enumerate() {
        let row: Value = match serde_json::from_str(line) {
            Ok(row) => row,
            // A run was interrupted while it wrote this row.
            Err(_) if !line.ends_with('\n') => continue,
            Err(e) => return Err(e).with_context(|| format!("{}, line {}", problem(), i + 1)),
        };
        let failed = row.get("error").is_some();
        if wanted.has(&row) && (failed || again) {
            continue;
        }
        kept += line.trim_end();
        kept.push('\n');
        if !failed {
            known.insert(key(&row));
        }
    }
    if kept != text {
        AtomicFile::create(path)?.fill(&kept)?;
    }
    Ok(known)
}
