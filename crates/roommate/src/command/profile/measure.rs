//! `roommate profile measure`: tasks alone and side by side, from a plan.

use crate::atomic::AtomicFile;
use crate::cli::Measure;
use crate::command::submit;
use crate::{ANSWER_NO, measurements, process, table};
use anyhow::Context;
use roommate_agent::measure::outfit::Outfit;
use roommate_agent::measure::plan::{EXAMPLE, Item, Plan};
use roommate_agent::measure::{Bench, Trouble, key, row};
use roommate_agent::{AgentError, signal};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

pub(super) fn run(args: &Measure) -> anyhow::Result<ExitCode> {
    let (Some(plan), Some(out)) = (&args.plan, &args.out) else {
        process::print(EXAMPLE)?;
        return Ok(ExitCode::SUCCESS);
    };
    let stop = signal::end_wanted()?;
    let text = text_of(plan)?;
    let plan = Plan::read(&text, &submit::absolute(plan)?).map_err(AgentError::from)?;
    let folder = tempfile::Builder::new()
        .prefix("roommate-")
        .tempdir()
        .context("could not make a folder")?;
    let outfit = Outfit::of(&plan, folder.path())?;
    let items = plan.items(outfit.sms).map_err(AgentError::from)?;
    let mut files = Files::open(out, &items, args.again)?;
    let left: Vec<&Item> = items.iter().filter(|i| !files.has(i)).collect();
    let known = items.len() - left.len();
    if known > 0 {
        process::say(&format!("{known} of {} are measured already", items.len()));
    }
    if left.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    process::say(&format!("on {}", outfit.device));
    let program = std::env::current_exe().context("could not find this program itself")?;
    let mut bench = Bench::open(&plan, outfit, folder.path(), &program, &stop)?;
    let done = all(&mut bench, &plan, &left, &mut files);
    bench.close();
    let failed = done?;
    let rows = table::count((left.len() - failed) as u64, "row");
    let names: Vec<String> = files.paths().map(|p| p.display().to_string()).collect();
    process::say(&format!("{rows} more in {}", names.join(" and ")));
    if failed > 0 {
        let what = table::count(failed as u64, "measurement");
        process::say(&format!(
            "{what} failed: see `error` in the rows; the same command tries again"
        ));
        return Ok(ExitCode::from(ANSWER_NO));
    }
    Ok(ExitCode::SUCCESS)
}

fn text_of(path: &Path) -> anyhow::Result<String> {
    fs::read_to_string(path).map_err(|e| {
        let what = format!("could not read {}: {e}", measurements::quoted(path));
        process::advise(what, "`roommate profile measure --example` prints a plan to begin with")
    })
}

/// Measures all that is left; how many failed.
fn all(
    bench: &mut Bench<'_>,
    plan: &Plan,
    left: &[&Item],
    files: &mut Files,
) -> anyhow::Result<usize> {
    bench
        .start(left.iter().copied(), |name, came| match came {
            Ok(s) => process::say(&format!("{name}: ready after {s:.1} s")),
            Err(how) => process::say(&format!("{name}: {how}")),
        })
        .map_err(stopped)?;
    let mut failed = 0;
    let began = Instant::now();
    for (i, item) in left.iter().enumerate() {
        let so_far = began.elapsed().as_secs_f64();
        let usual = plan.settle + plan.seconds + 0.1;
        let each = if i == 0 { usual } else { so_far / i as f64 };
        let eta = table::figure(Some(each * (left.len() - i) as f64), "s");
        process::say(&format!("{} of {}, {eta} left: {}", i + 1, left.len(), words(item)));
        let measured = match bench.measure(item) {
            Ok(measured) => Ok(measured),
            Err(Trouble::Item(what)) => {
                process::say(&format!("  {what}"));
                failed += 1;
                Err(what)
            }
            Err(other) => return Err(stopped(other)),
        };
        files.add(item, &row(item, &measured), measured.is_ok())?;
    }
    Ok(failed)
}

fn stopped(trouble: Trouble) -> anyhow::Error {
    match trouble {
        Trouble::Agent(e) => e.into(),
        other => process::advise(
            format!("could not measure everything: {other}"),
            "what was measured is kept; the same command goes on with the rest",
        ),
    }
}

/// An item for a person.
fn words(item: &Item) -> String {
    let field = |name: &str| item.identity.iter().find(|(n, _)| *n == name).map(|(_, v)| v);
    let text = |v: &Value| v.as_str().map_or_else(|| v.to_string(), String::from);
    let named =
        |name: &str, batch: &str| Some(format!("{}@{}", text(field(name)?), text(field(batch)?)));
    let who = match (named("name", "batch"), named("a", "batch_a"), named("b", "batch_b")) {
        (Some(one), _, _) => one,
        (_, Some(a), Some(b)) => format!("{a} + {b}"),
        _ => {
            let list = |name: &str| field(name).and_then(Value::as_array).cloned();
            let (names, batches) = (list("tasks").unwrap_or_default(), list("batches"));
            let each = names.iter().zip(batches.iter().flatten());
            each.map(|(n, b)| format!("{}@{b}", text(n))).collect::<Vec<_>>().join(" + ")
        }
    };
    let seats: Vec<String> =
        item.members.iter().filter_map(|m| Some(m.seat?.sms.to_string())).collect();
    let parts =
        if seats.is_empty() { String::new() } else { format!(" on {} SMs", seats.join(" + ")) };
    let round = field("round").and_then(Value::as_u64);
    let round = round.map_or_else(String::new, |n| format!(", round {}", n + 1));
    format!("{who}{parts}{round}")
}

/// The files that rows go into, and what they hold.
struct Files {
    /// Of everything but services beside training.
    plain: (PathBuf, Option<File>),
    /// Of services: beside training, and alone once more, which that is divided by.
    services: (PathBuf, Option<File>),
    known: BTreeSet<String>,
}

impl Files {
    /// Reads what was measured before. Measurements of these items that failed, and with `again` all of
    /// them, are taken out.
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
        let wanted: BTreeSet<String> = items.iter().map(Item::key).collect();
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

    fn add(&mut self, item: &Item, row: &str, good: bool) -> anyhow::Result<()> {
        let serves = item.identity.iter().any(|(n, v)| *n == "kind" && v == "serve");
        if !item.of_services {
            append(&mut self.plain, row)?;
        }
        if item.of_services || (serves && good) {
            append(&mut self.services, row)?;
        }
        Ok(())
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

/// The rows of a file that stay, by what they are of.
fn tidy(path: &Path, wanted: &BTreeSet<String>, again: bool) -> anyhow::Result<BTreeSet<String>> {
    let problem = || format!("could not read measurements {}", measurements::quoted(path));
    let text = fs::read_to_string(path).with_context(problem)?;
    let mut known = BTreeSet::new();
    let mut kept = String::new();
    for (i, line) in text.split_inclusive('\n').enumerate() {
        let row: Value = match serde_json::from_str(line) {
            Ok(row) => row,
            // A run that was cut off in the middle of a row.
            Err(_) if !line.ends_with('\n') => continue,
            Err(e) => return Err(e).with_context(|| format!("{}, line {}", problem(), i + 1)),
        };
        let key = key(&row);
        let failed = row.get("error").is_some();
        if wanted.contains(&key) && (failed || again) {
            continue;
        }
        kept += line.trim_end();
        kept.push('\n');
        if !failed {
            known.insert(key);
        }
    }
    if kept != text {
        AtomicFile::create(path)?.fill(&kept)?;
    }
    Ok(known)
}
