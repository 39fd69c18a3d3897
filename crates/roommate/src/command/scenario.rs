//! Scenarios: several policies over several seeds, compared with published results.

use crate::atomic::{self, AtomicFile};
use crate::cli::{self, Compare, Output, Sim, TraceInput, WorldArgs};
use crate::experiment::{Choice, Lab, Run};
use crate::{console, table};
use anyhow::Context;
use roommate_core::interference;
use roommate_core::measurement::atlas::Atlas;
use roommate_core::policy::{self, POLICIES};
use roommate_sim::report::league;
use roommate_sim::report::view::View;
use roommate_sim::report::{self, Card, RunView};
use roommate_sim::scenario::score::{FIGURES, Figure, Mean, Score};
use roommate_sim::scenario::{Contender, Published, SampledWorkload, Scenario};
use roommate_sim::truth::{self, Truth};
use serde_json::{Map, Value, json};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Whether the file is a scenario rather than a trace.
pub(super) fn is_one(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "toml")
}

/// The true interference model of a scenario, without noise.
pub(super) fn truth(sampled: &SampledWorkload, atlas: &Arc<Atlas>) -> Box<dyn interference::Truth> {
    Truth::mapped(Arc::clone(atlas), sampled.works.clone()).model(&sampled.workload.profiles).0
}

/// The policy and the laboratory of `roommate sim`.
pub(super) fn one(path: &Path, args: &Sim, set: &[&str]) -> anyhow::Result<(Choice, Lab)> {
    refuse_world(&WorldArgs { seed: 0, ..args.world.clone() }, &args.input)?;
    let atlas = Arc::new(truth::h200()?);
    let scenario = Scenario::read(path, &atlas)?;
    let choice = Choice::of_scenario(&contender(&scenario, &args.policy)?, set)?;
    Ok((choice, Lab::of_scenario(&scenario, args.world.seed, &atlas)?))
}

/// Refuses flags about the simulation and the trace, which a scenario defines itself.
fn refuse_world(world: &WorldArgs, input: &TraceInput) -> anyhow::Result<()> {
    let (defaults, input_defaults) = cli::defaults();
    if *world == defaults && *input == input_defaults {
        return Ok(());
    }
    let what = "a scenario describes its own world: no flags about cluster, truth, costs or traces";
    Err(console::advise(what, "copy the file and change it there"))
}

/// The policy as in the scenario, or with its defaults if the scenario does not list it.
fn contender(scenario: &Scenario, name: &str) -> anyhow::Result<Contender> {
    if let Some(known) = scenario.policies().find(|p| p.label() == name) {
        return Ok(known.clone());
    }
    policy::find(name)?;
    Ok(Contender {
        name: name.into(),
        label: None,
        params: policy::Params::new(),
        published: Published::default(),
    })
}

/// `roommate compare` with a scenario.
pub(super) fn compare(path: &Path, args: &Compare) -> anyhow::Result<ExitCode> {
    refuse_world(&args.world, &args.input)?;
    if args.journals.is_some() {
        let hint = "`roommate sim` with --seed and --journal writes one";
        return Err(console::advise("--journals: not for scenarios", hint));
    }
    if args.wide || args.sort.is_some() {
        let hint = "-o csv prints every figure of every run";
        let what = "--wide and --sort: a scenario says itself what is compared, and in which order";
        return Err(console::advise(what, hint));
    }
    if let Some(report) = &args.report {
        atomic::keep_apart(path, report)?;
    }
    let atlas = Arc::new(truth::h200()?);
    let scenario = Scenario::read(path, &atlas)?;
    let contenders = contenders(&scenario, args)?;
    let page = args.report.as_deref().map(AtomicFile::create).transpose()?;
    let seeds = args.seeds.map_or(scenario.seeds, |n| n as u64);
    let labs: anyhow::Result<Vec<Lab>> =
        (0..seeds).map(|seed| Lab::of_scenario(&scenario, seed, &atlas)).collect();
    let study = Study { scenario: &scenario, labs: labs?, contenders };
    if args.output == Output::Table {
        console::say(&study.title());
        scenario.remarks().iter().for_each(|r| console::say(r));
    }
    let (scores, views) = study.run(args)?;
    if let Some(page) = page {
        let cards = study.cards(&scores);
        page.fill(&report::render_with(&study.title(), &cards, &views, league::SORTED_BY))?;
    }
    match args.output {
        Output::Json => {
            let text = serde_json::to_string_pretty(&study.json(&scores)?)?;
            console::print(&(text + "\n"))?;
        }
        Output::Csv => console::print(&csv(&scores))?,
        Output::Table => {
            let tables = study.cards(&scores);
            let texts = tables.iter().map(|c| format!("{}\n{}", c.note, table::align(&c.rows)));
            console::print(&texts.collect::<Vec<_>>().join("\n"))?;
            if let Some(path) = &args.report {
                console::say(&format!("report: {}", path.display()));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The policies of the scenario, the given ones, or with `-p all` those of the scenario and all
/// others.
fn contenders(scenario: &Scenario, args: &Compare) -> anyhow::Result<Vec<(Contender, Choice)>> {
    let own = scenario.policies().map(|p| p.label().to_owned()).collect::<Vec<String>>();
    let names: Vec<String> = match &args.policies[..] {
        [] => own,
        [word] if word == super::compare::ALL => {
            let listed = |name: &&str| scenario.policies().any(|p| p.name == *name);
            let others =
                POLICIES.iter().map(|e| e.name).filter(|name| !listed(name)).map(String::from);
            own.into_iter().chain(others).collect()
        }
        _ => args.policies.clone(),
    };
    let mut sets: Vec<Vec<&str>> = vec![Vec::new(); names.len()];
    for pair in &args.set {
        let split = pair.split_once('.').filter(|(policy, _)| !policy.contains('='));
        let at = split.and_then(|(policy, _)| names.iter().position(|n| n == policy));
        let (Some((_, rest)), Some(at)) = (split, at) else {
            let what = format!("--set {pair:?}: expected POLICY.NAME=VALUE of a policy that runs");
            return Err(console::advise(what, format!("these run: {}", names.join(", "))));
        };
        sets[at].push(rest);
    }
    let one = |(name, set): (&String, Vec<&str>)| {
        let contender = contender(scenario, name)?;
        let choice = Choice::of_scenario(&contender, &set)?;
        Ok((contender, choice))
    };
    names.iter().zip(sets).map(one).collect()
}

/// A scenario with its seeds and policies.
struct Study<'a> {
    scenario: &'a Scenario,
    /// By seed.
    labs: Vec<Lab>,
    contenders: Vec<(Contender, Choice)>,
}

/// The result of one policy and seed, written by the thread that ran it.
type Slot = Mutex<Option<anyhow::Result<(Run, Option<View>)>>>;

impl Study<'_> {
    fn title(&self) -> String {
        let seeds = table::count(self.labs.len() as u64, "seed");
        format!("{}, {seeds}", self.labs[0].title())
    }

    /// Runs every policy on every seed, in parallel.
    fn run(&self, args: &Compare) -> anyhow::Result<(Vec<Score>, Vec<RunView>)> {
        let runs = self.contenders.len() * self.labs.len();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = args.jobs.unwrap_or(cores).clamp(1, runs);
        let bar = super::runs_bar(runs);
        let next = AtomicUsize::new(0);
        let done: Vec<Slot> = (0..runs).map(|_| Mutex::new(None)).collect();
        let work = || {
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                let Some(slot) = done.get(i) else { return };
                let (seed, which) = (i / self.contenders.len(), i % self.contenders.len());
                let (contender, choice) = &self.contenders[which];
                bar.set_message(format!("{} seed {seed}", contender.label()));
                // The page shows single runs of the first seed only.
                let mut view = (args.report.is_some() && seed == 0).then(View::default);
                let run = self.labs[seed].run(choice, None, &mut view, &mut |_| {});
                bar.inc(1);
                if let Ok(mut slot) = slot.lock() {
                    *slot = Some(run.map(|r| (r, view)));
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(work);
            }
        });
        bar.finish_and_clear();
        self.collect(done)
    }

    fn collect(&self, done: Vec<Slot>) -> anyhow::Result<(Vec<Score>, Vec<RunView>)> {
        let empty = |c: &(Contender, Choice)| Score {
            label: c.0.label().into(),
            outcomes: Vec::new(),
            published: c.0.published,
        };
        let mut scores: Vec<Score> = self.contenders.iter().map(empty).collect();
        let mut views = Vec::new();
        for (i, slot) in done.into_iter().enumerate() {
            let (seed, which) = (i / scores.len(), i % scores.len());
            let score = &mut scores[which];
            let place = || format!("{}, seed {seed}", score.label);
            let result = slot.into_inner().ok().flatten();
            let (run, view) = result.context("did not run").flatten().with_context(place)?;
            views.extend(view.map(|v| v.finish(&score.label, "")));
            score.outcomes.push(self.labs[seed].outcome(run));
        }
        Ok((scores, views))
    }

    fn ours<'s>(&self, scores: &'s [Score]) -> Option<&'s Score> {
        scores.iter().find(|s| s.label == *self.scenario.ours.get_ref())
    }

    /// The tables: results of the policies, and ratios to `ours` beside the published ones.
    fn cards(&self, scores: &[Score]) -> Vec<Card> {
        let shown: Vec<&Figure> =
            FIGURES.iter().filter(|f| scores.iter().any(|s| s.mean(f).is_some())).collect();
        let head = |first: &str, names: Vec<String>| -> Vec<String> {
            std::iter::once(first.to_owned()).chain(names).collect()
        };
        let names = shown.iter().map(|f| f.label.to_owned()).collect();
        let mut rows = vec![head("", names)];
        for score in scores {
            let cells = shown.iter().map(|f| mean(score.mean(f), f.unit)).collect();
            rows.push(head(&score.label, cells));
        }
        let what = Card {
            heading: "Over all seeds".into(),
            note: "mean ± half of the 95 % interval".into(),
            rows,
        };
        std::iter::once(what).chain(self.beside_ours(scores)).collect()
    }

    fn beside_ours(&self, scores: &[Score]) -> Option<Card> {
        let ours = self.ours(scores).filter(|_| scores.len() > 1)?;
        let figures = FIGURES.iter().filter(|f| f.unit == "s");
        let figures: Vec<&Figure> =
            figures.filter(|f| scores.iter().any(|s| s.over(ours, f).is_some())).collect();
        let heads = figures
            .iter()
            .flat_map(|f| [f.label.to_owned(), "published".to_owned(), "difference".to_owned()]);
        let mut rows = vec![std::iter::once(String::new()).chain(heads).collect::<Vec<_>>()];
        for score in scores.iter().filter(|s| s.label != ours.label) {
            let mut row = vec![score.label.clone()];
            for figure in &figures {
                let ratio = score.over(ours, figure);
                let published = score.published(figure);
                let difference = ratio.zip(published).map(|(r, p)| r.mean - p);
                row.push(mean(ratio, "ratio"));
                row.push(published.map_or("-".into(), |p| format!("{p:.2}")));
                row.push(difference.map_or("-".into(), |d| format!("{d:+.2}")));
            }
            rows.push(row);
        }
        let name = &ours.label;
        Some(Card {
            heading: format!("Divided by {name}"),
            note: format!("divided by {name}, seed by seed: above 1, {name} is better"),
            rows,
        })
    }

    fn json(&self, scores: &[Score]) -> anyhow::Result<Value> {
        let mut about = self.labs[0].describe();
        let tasks: Vec<Value> = self
            .scenario
            .tasks()
            .map(|t| {
                json!({"model": t.model, "batch": t.batch, "measured": t.measured,
                "measured_batch": t.measured_batch.unwrap_or(t.batch), "because": t.because})
            })
            .collect();
        about.remove("seed");
        about.insert("about".into(), json!(self.scenario.about));
        about.insert("source".into(), json!(self.scenario.source));
        about.insert("remarks".into(), json!(self.scenario.remarks()));
        about.insert("seeds".into(), json!(self.labs.len()));
        about.insert("jobs".into(), json!(self.labs[0].jobs()));
        about.insert("ours".into(), json!(self.scenario.ours.get_ref()));
        about.insert("tasks".into(), Value::Array(tasks));
        let ours = self.ours(scores);
        let results = scores.iter().zip(&self.contenders).map(|(score, (_, choice))| {
            let mut figures = Map::new();
            for figure in FIGURES {
                figures.insert(
                    figure.key.into(),
                    json!({
                        "mean": score.mean(figure),
                        "over_ours": ours.and_then(|o| score.over(o, figure)),
                        "published": score.published(figure),
                    }),
                );
            }
            let seeds: Result<Vec<Value>, _> =
                score.outcomes.iter().map(|o| serde_json::to_value(&o.metrics)).collect();
            Ok(json!({"policy": score.label, "name": choice.name(), "params": choice.params(),
                "figures": figures, "by_seed": seeds?}))
        });
        let results: anyhow::Result<Vec<Value>> = results.collect();
        about.insert("results".into(), Value::Array(results?));
        Ok(Value::Object(about))
    }
}

/// One row for each run.
fn csv(scores: &[Score]) -> String {
    let mut text = String::new();
    for score in scores {
        for (seed, outcome) in score.outcomes.iter().enumerate() {
            let rows = outcome.metrics.rows();
            if text.is_empty() {
                let keys: Vec<&str> = rows.iter().map(|r| r.key).collect();
                text += &format!("policy,seed,{},sm_busy\n", keys.join(","));
            }
            let cell = |v: Option<f64>| v.map(|v| v.to_string()).unwrap_or_default();
            let cells: Vec<String> = rows.iter().map(|r| cell(r.value)).collect();
            text += &format!("{},{seed},{},{}\n", score.label, cells.join(","), outcome.sm_busy);
        }
    }
    text
}

/// A mean with its confidence interval, in one unit.
fn mean(value: Option<Mean>, unit: &str) -> String {
    let Some(Mean { mean, half }) = value else { return "-".into() };
    let (scale, digits, unit) = match unit {
        "share" => (100.0, 2, " %"),
        "s" if mean < 120.0 => (1.0, 1, " s"),
        "s" if mean < 7_200.0 => (1.0 / 60.0, 1, " min"),
        "s" => (1.0 / 3_600.0, 2, " h"),
        _ => (1.0, 2, ""),
    };
    let number = |v: f64| format!("{:.digits$}", v * scale);
    let half = half.map_or(String::new(), |h| format!(" ± {}", number(h)));
    format!("{}{half}{unit}", number(mean))
}
