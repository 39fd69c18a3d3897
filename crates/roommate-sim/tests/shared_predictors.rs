//! Generalisation errors of co-location predictors on public measurements and on ours. The public
//! ones are in `../shared`, outside the repository; without them this test prints that it is
//! skipped and passes, unless `ROOMMATE_REQUIRE_SHARED=1`.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "this is a test")]

mod shared;

use expect_test::expect;
use roommate_core::idx::{Idx, IdxVec, ProfileIdx};
use roommate_core::interference::degradation::{DegradationModel, ResourceDemand, View};
use roommate_core::math::forest::{Forest, Options};
use roommate_core::math::stat;
use roommate_core::measurement::atlas::Atlas;
use roommate_core::measurement::rows::{self, Row, TaskKind};
use roommate_sim::trace::gzip;
use roommate_sim::truth;
use shared::shared;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::Path;

/// A CSV file without quotes: its header and its rows.
fn table(path: &Path) -> (Vec<String>, Vec<Vec<String>>) {
    let mut text = String::new();
    gzip::open(path).unwrap().read_to_string(&mut text).unwrap();
    let cells = |line: &str| line.split(',').map(|c| c.trim().to_owned()).collect::<Vec<_>>();
    let mut lines = text.lines().filter(|l| !l.trim().is_empty());
    (cells(lines.next().unwrap()), lines.map(cells).collect())
}

/// Errors of predictions.
#[derive(Default)]
struct Errors {
    /// |predicted / true − 1|.
    relative: Vec<f64>,
    /// |predicted − true|.
    absolute: Vec<f64>,
}

impl Errors {
    fn add(&mut self, predicted: f64, actual: f64) {
        self.relative.push((predicted / actual - 1.0).abs());
        self.absolute.push((predicted - actual).abs());
    }

    fn row(&self, what: &str) -> String {
        let mut sorted = self.relative.clone();
        sorted.sort_by(f64::total_cmp);
        format!(
            "| {what} | {} | {:.1} % | {:.1} % | {:.3} |\n",
            self.relative.len(),
            100.0 * stat::mean(&self.relative).unwrap(),
            100.0 * stat::median(&sorted).unwrap(),
            stat::mean(&self.absolute).unwrap()
        )
    }
}

/// Leave-one-group-out cross-validation; the rows of one group are left out together. Errors are
/// those of the prediction plus `base` of its row.
fn cross_validate(rows: &[(usize, Vec<f64>, f64)], base: &dyn Fn(&[f64]) -> f64) -> Errors {
    let groups: BTreeSet<usize> = rows.iter().map(|r| r.0).collect();
    let mut errors = Errors::default();
    for out in groups {
        let rest = || rows.iter().filter(|r| r.0 != out);
        let features: Vec<Vec<f64>> = rest().map(|r| r.1.clone()).collect();
        let targets: Vec<f64> = rest().map(|r| r.2.ln()).collect();
        let options = Options { trees: 100, ..Options::default() };
        let forest = Forest::grow(&features, &targets, options).unwrap();
        for (_, row, actual) in rows.iter().filter(|r| r.0 == out) {
            errors.add(base(row) + forest.predict(row).0.exp(), base(row) + actual);
        }
    }
    errors
}

/// A count written in binary digits: 10 is two.
fn binary(text: &str) -> f64 {
    f64::from(u32::from_str_radix(text, 2).unwrap())
}

#[test]
fn counts_of_the_public_patterns_are_binary() {
    assert_eq!(["00", "01", "10", "11"].map(binary), [0.0, 1.0, 2.0, 3.0]);
}

/// Patterns of the `IADeep` artifact: the number of instances of each of eight tasks, and the sum
/// of their slowdowns.
struct Patterns {
    tasks: Vec<String>,
    rows: Vec<(Vec<f64>, f64)>,
}

fn patterns(shared: &Path) -> Patterns {
    let (header, rows) = table(&shared.join("traces/iadeep/interference.csv"));
    let counts: Vec<usize> = (0..header.len()).filter(|i| header[*i].ends_with("_num")).collect();
    let label = header.iter().position(|h| h == "sum_interference").unwrap();
    let tasks = counts.iter().map(|i| header[*i].trim_end_matches("_num").replace("goo", "goog"));
    let of = |row: &Vec<String>| {
        let counts = counts.iter().map(|i| binary(&row[*i])).collect();
        (counts, row[label].parse().unwrap())
    };
    Patterns { tasks: tasks.collect(), rows: rows.iter().map(of).collect() }
}

/// SM and memory utilisation of the tasks alone, from 0 to 1.
fn utilisation(shared: &Path) -> BTreeMap<String, (f64, f64)> {
    let (header, rows) = table(&shared.join("traces/iadeep/interference_util.csv"));
    let mut known = BTreeMap::new();
    for (i, name) in header.iter().enumerate().filter(|(_, h)| h.ends_with("_sm")) {
        // Some rows have the values of a co-located task; the most frequent values are the task's
        // own.
        let mut seen: BTreeMap<(String, String), usize> = BTreeMap::new();
        for row in rows.iter().filter(|r| r[i].parse::<f64>().unwrap() > 0.0) {
            *seen.entry((row[i].clone(), row[i + 1].clone())).or_default() += 1;
        }
        let ((sm, mem), _) = seen.into_iter().max_by_key(|s| s.1).unwrap();
        let share = |text: String| text.parse::<f64>().unwrap() / 100.0;
        known.insert(name.trim_end_matches("_sm").to_owned(), (share(sm), share(mem)));
    }
    known
}

#[test]
fn patterns_of_the_iadeep_artifact() {
    let Some(shared) = shared() else { return };
    let Patterns { tasks, rows } = patterns(&shared);
    let mut text = String::new();
    // Equal patterns form one group, so that none is in both training and test data.
    let keys: BTreeSet<String> = rows.iter().map(|r| format!("{:?}", r.0)).collect();
    let group = |counts: &Vec<f64>| keys.iter().position(|k| *k == format!("{counts:?}")).unwrap();
    let by_pattern: Vec<_> = rows.iter().map(|(c, y)| (group(c), c.clone(), *y)).collect();
    let with_total = |(g, c, y): &(usize, Vec<f64>, f64)| {
        let total = c.iter().sum::<f64>();
        (*g, c.iter().copied().chain([total]).collect::<Vec<f64>>(), *y)
    };
    let taught: Vec<_> = by_pattern.iter().map(with_total).collect();
    text += &cross_validate(&taught, &|_| 0.0).row("IADeep artifact, pattern, patterns never seen");
    let tenants = |row: &[f64]| row[row.len() - 1];
    text += &cross_validate(&taught, &tenants)
        .row("the same as a sum of PDs (one more for each tenant)");

    let util = utilisation(&shared);
    let known =
        |counts: &[f64]| tasks.iter().zip(counts).all(|(t, c)| *c == 0.0 || util.contains_key(t));
    let counters = |counts: &[f64]| -> Vec<f64> {
        let there = tasks.iter().zip(counts).filter(|(_, c)| **c > 0.0);
        let there: Vec<(f64, f64, f64)> = there.map(|(t, c)| (*c, util[t].0, util[t].1)).collect();
        let sum = |of: &dyn Fn(&(f64, f64, f64)) -> f64| there.iter().map(of).sum::<f64>();
        let most = |of: &dyn Fn(&(f64, f64, f64)) -> f64| there.iter().map(of).fold(0.0, f64::max);
        let (n, sm, mem) = (sum(&|t| t.0), sum(&|t| t.0 * t.1), sum(&|t| t.0 * t.2));
        let squares = sum(&|t| t.0 * t.1 * t.1);
        vec![n, sm, mem, most(&|t| t.1), most(&|t| t.2), sm * sm - squares, sm / n, mem / n]
    };
    let usable: Vec<_> = by_pattern.iter().filter(|r| known(&r.1)).collect();
    let rows_of = |group: &dyn Fn(&[f64], usize) -> usize| -> Vec<(usize, Vec<f64>, f64)> {
        usable.iter().map(|(g, c, y)| (group(c, *g), counters(c), *y)).collect()
    };
    let rows_by_counters = rows_of(&|_, g| g);
    text += &cross_validate(&rows_by_counters, &|_| 0.0).row("the same, counters");
    text += &cross_validate(&rows_by_counters, &|row| row[0])
        .row("the same, counters, as a sum of PDs");
    // For each task, all patterns that contain it are left out.
    let mut unseen = Errors::default();
    for task in 0..tasks.len() {
        let out = rows_of(&|counts, _| usize::from(counts[task] > 0.0));
        let has = |r: &(usize, Vec<f64>, f64)| r.0 == 1;
        if !out.iter().any(has) || out.iter().all(has) {
            continue;
        }
        let features: Vec<Vec<f64>> = out.iter().filter(|r| !has(r)).map(|r| r.1.clone()).collect();
        let targets: Vec<f64> = out.iter().filter(|r| !has(r)).map(|r| r.2.ln()).collect();
        let options = Options { trees: 100, ..Options::default() };
        let forest = Forest::grow(&features, &targets, options).unwrap();
        for (_, row, actual) in out.iter().filter(|r| has(r)) {
            unseen.add(forest.predict(row).0.exp(), *actual);
        }
    }
    text += &unseen.row("the same, counters, tasks never seen");
    expect![[r#"
        | IADeep artifact, pattern, patterns never seen | 91 | 44.2 % | 23.5 % | 0.376 |
        | the same as a sum of PDs (one more for each tenant) | 91 | 8.1 % | 5.3 % | 0.376 |
        | the same, counters | 84 | 82.8 % | 55.3 % | 0.745 |
        | the same, counters, as a sum of PDs | 84 | 15.9 % | 11.5 % | 0.745 |
        | the same, counters, tasks never seen | 170 | 170.3 % | 59.5 % | 0.916 |
    "#]]
    .assert_eq(&text);
}

/// One side of a pair: (profile, co-located profile, degradation).
type Side = (ProfileIdx, ProfileIdx, f64);

/// Predicts each fold with a predictor trained on the others.
fn predict(view: View, demands: &[ResourceDemand], folds: &[(Vec<Side>, Vec<Side>)]) -> Errors {
    let mut errors = Errors::default();
    for (taught, asked) in folds {
        let mut predictor = DegradationModel::new(view, 0);
        for (i, demand) in demands.iter().enumerate() {
            predictor.count(ProfileIdx::from_usize(i), *demand);
        }
        for (who, other, pd) in taught {
            predictor.learn(*who, &[*other], *pd);
        }
        predictor.refresh();
        for (who, other, pd) in asked {
            errors.add(predictor.predict(*who, &[*other]).pd, *pd);
        }
    }
    errors
}

/// Ten folds of pairs; and one fold for each group of profiles, with all its pairs.
fn folds(sides: &[Side], group: &dyn Fn(ProfileIdx) -> usize) -> [Vec<(Vec<Side>, Vec<Side>)>; 2] {
    let key = |s: &Side| (s.0.min(s.1), s.0.max(s.1));
    let pairs: BTreeSet<(ProfileIdx, ProfileIdx)> = sides.iter().map(key).collect();
    let at: BTreeMap<_, usize> = pairs.iter().enumerate().map(|(i, p)| (*p, i)).collect();
    let split = |out: &dyn Fn(&Side) -> bool| -> (Vec<Side>, Vec<Side>) {
        sides.iter().partition(|s| !out(s))
    };
    let by_pair = (0..10).map(|f| split(&|s: &Side| at[&key(s)] * 7 % 10 == f)).collect();
    let groups: BTreeSet<usize> = sides.iter().flat_map(|s| [group(s.0), group(s.1)]).collect();
    let with = |g: usize| split(&|s: &Side| group(s.0) == g || group(s.1) == g);
    [by_pair, groups.into_iter().map(with).collect()]
}

#[test]
fn pairs_of_lucid() {
    let Some(shared) = shared() else { return };
    let (header, profiles) = table(&shared.join("traces/lucid/single_job_profiles.csv"));
    let column = |header: &[String], name: &str| header.iter().position(|h| h == name).unwrap();
    let number = |row: &[String], at: usize| row[at].parse::<f64>().unwrap();
    let key = |row: &[String], header: &[String], suffix: &str| {
        let names = ["model", "dataset", "batchsize", "amp"];
        names.map(|n| row[column(header, &format!("{n}{suffix}"))].clone())
    };
    let mut kinds: Vec<[String; 4]> = Vec::new();
    let mut demands: Vec<ResourceDemand> = Vec::new();
    for row in &profiles {
        let share = |name: &str| number(row, column(&header, name)) / 100.0;
        kinds.push(key(row, &header, ""));
        demands.push(ResourceDemand {
            sm: share("gpu_util"),
            dram: share("gmem_util"),
            mem_gib: number(row, column(&header, "gmem")) / 1024.0,
            cpu: 1.0,
            batch: number(row, column(&header, "batchsize")),
        });
    }
    let (header, pairs) = table(&shared.join("traces/lucid/colocation_pairs.csv.gz"));
    let mut sides: Vec<Side> = Vec::new();
    for row in pairs.iter().filter(|r| number(r, column(&header, "gpu_num1")) == 1.0) {
        let kind = |suffix| kinds.iter().position(|k| *k == key(row, &header, suffix));
        let (Some(a), Some(b)) = (kind("1"), kind("2")) else { continue };
        let (a, b) = (ProfileIdx::from_usize(a), ProfileIdx::from_usize(b));
        let speed = |name: &str| number(row, column(&header, name));
        let both = [(a, b, speed("speed1")), (b, a, speed("speed2"))];
        sides.extend(both.iter().filter(|s| s.2 > 0.05).map(|(a, b, s)| (*a, *b, 1.0 / s)));
    }
    let models: IdxVec<ProfileIdx, &String> = kinds.iter().map(|k| &k[0]).collect();
    let model = |kind: ProfileIdx| models.iter().position(|m| *m == models[kind]).unwrap();
    let [by_pair, by_model] = folds(&sides, &model);
    let mut text = String::new();
    text += &predict(View::Pattern, &demands, &by_pair).row("Lucid, pattern, pairs never seen");
    text += &predict(View::Counters, &demands, &by_pair).row("Lucid, counters, pairs never seen");
    text += &predict(View::Counters, &demands, &by_model).row("Lucid, counters, models never seen");
    let mean = sides.iter().map(|s| s.2.ln()).sum::<f64>() / sides.len() as f64;
    let mut flat = Errors::default();
    sides.iter().for_each(|s| flat.add(mean.exp(), s.2));
    text += &flat.row("Lucid, the mean of all");
    expect![[r#"
        | Lucid, pattern, pairs never seen | 2776 | 10.7 % | 7.2 % | 0.116 |
        | Lucid, counters, pairs never seen | 2776 | 6.8 % | 4.1 % | 0.075 |
        | Lucid, counters, models never seen | 5194 | 8.0 % | 5.2 % | 0.087 |
        | Lucid, the mean of all | 2776 | 10.0 % | 7.8 % | 0.115 |
    "#]]
    .assert_eq(&text);
}

#[test]
fn pairs_of_the_h200() {
    let atlas: Atlas = truth::h200().unwrap();
    let rows = rows::parse(include_str!("../../../profiles/h200-pairs.jsonl")).unwrap();
    let mut kinds: Vec<(String, u32)> = Vec::new();
    let mut kind = |name: &str, batch: u32| {
        let at = kinds.iter().position(|k| k.0 == name && k.1 == batch);
        let at = at.unwrap_or_else(|| {
            kinds.push((name.to_owned(), batch));
            kinds.len() - 1
        });
        ProfileIdx::from_usize(at)
    };
    let alone: BTreeMap<(String, u32), f64> = rows
        .iter()
        .filter_map(|r| {
            if let Row::Alone(a) = r { Some(((a.a.clone(), a.batch), a.it_s)) } else { None }
        })
        .collect();
    let mut sides: Vec<Side> = Vec::new();
    for row in &rows {
        let Row::Trainings(pair) = row else { continue };
        let (a, b) = (kind(&pair.a, pair.batch_a), kind(&pair.b, pair.batch_b));
        let solo = |name: &str, batch: u32| {
            let task = atlas.task(TaskKind::Train, name).unwrap();
            let known = alone.get(&(name.to_owned(), batch)).copied();
            known.unwrap_or_else(|| atlas.steps_per_s(task, batch))
        };
        sides.push((a, b, solo(&pair.a, pair.batch_a) / pair.ra.it_s));
        sides.push((b, a, solo(&pair.b, pair.batch_b) / pair.rb.it_s));
    }
    let demand = |(name, batch): &(String, u32)| {
        let task = atlas.task(TaskKind::Train, name).unwrap();
        let counters = atlas.counters(task, *batch);
        ResourceDemand {
            sm: counters.sm_util,
            dram: counters.dram_util,
            mem_gib: f64::from(counters.mem_mib) / 1024.0,
            cpu: 1.0,
            batch: f64::from(*batch),
        }
    };
    let demands: Vec<ResourceDemand> = kinds.iter().map(demand).collect();
    let names: IdxVec<ProfileIdx, &String> = kinds.iter().map(|k| &k.0).collect();
    let task = |kind: ProfileIdx| names.iter().position(|n| *n == names[kind]).unwrap();
    let [by_pair, by_task] = folds(&sides, &task);
    let mut text = String::new();
    text += &predict(View::Pattern, &demands, &by_pair).row("H200, pattern, pairs never seen");
    text += &predict(View::Counters, &demands, &by_pair).row("H200, counters, pairs never seen");
    text += &predict(View::Counters, &demands, &by_task).row("H200, counters, tasks never seen");
    let untaught: Vec<(Vec<Side>, Vec<Side>)> = vec![(Vec::new(), sides.clone())];
    text +=
        &predict(View::Counters, &demands, &untaught).row("H200, rule of thumb, nothing taught");
    let mean = sides.iter().map(|s| s.2.ln()).sum::<f64>() / sides.len() as f64;
    let mut flat = Errors::default();
    sides.iter().for_each(|s| flat.add(mean.exp(), s.2));
    text += &flat.row("H200, the mean of all");
    expect![[r#"
        | H200, pattern, pairs never seen | 96 | 8.3 % | 5.3 % | 0.178 |
        | H200, counters, pairs never seen | 96 | 7.7 % | 5.5 % | 0.163 |
        | H200, counters, tasks never seen | 182 | 16.2 % | 9.3 % | 0.397 |
        | H200, rule of thumb, nothing taught | 96 | 19.3 % | 10.2 % | 0.556 |
        | H200, the mean of all | 96 | 27.9 % | 19.1 % | 0.649 |
    "#]]
    .assert_eq(&text);
}
