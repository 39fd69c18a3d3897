//! Whether tasks that were measured side by side should run so, and how: among the configurations
//! in which no task is slowed down too much, the one with the highest throughput, if that is enough
//! more than running one task at a time.

use crate::measurement::rows::{Rate, Row, TaskKind};
use std::collections::{BTreeMap, BTreeSet};

/// A task at a batch size.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Workload {
    /// The task.
    pub name: String,
    /// Its batch size.
    pub batch: u32,
    /// Training or service.
    pub kind: TaskKind,
}

/// How the tasks of a set share a GPU; ordered so that plainly is first.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Way {
    /// Index of the task with priority; `None` if all are equal.
    pub first: Option<usize>,
    /// SMs of each task (all SMs = not confined); `None` if no task is confined.
    pub sms: Option<Vec<u32>>,
}

impl Way {
    /// Whether no task is confined and none has priority.
    pub fn is_plain(&self) -> bool {
        *self == Self::default()
    }
}

/// A measured way to run a set of tasks.
#[derive(Clone, Debug, PartialEq)]
pub struct Configuration {
    /// The way.
    pub way: Way,
    /// Speed of each task, relative to alone on the whole GPU: the mean of its runs.
    pub speeds: Vec<f64>,
    /// Standard error of each of these means; 0 for a single run, where it is unknown.
    pub errors: Vec<f64>,
    /// Standard error of their sum.
    pub sum_error: f64,
}

impl Configuration {
    /// Throughput of the set; 1 = the throughput of one task alone.
    pub fn sum(&self) -> f64 {
        self.speeds.iter().sum()
    }

    /// Slowdown of each task relative to alone.
    pub fn slowdowns(&self) -> impl Iterator<Item = f64> {
        self.speeds.iter().map(|s| 1.0 / s)
    }

    /// Largest slowdown of any task, one standard error towards the worse.
    fn slowest(&self) -> f64 {
        let at_worst = self.speeds.iter().zip(&self.errors).map(|(s, e)| 1.0 / (s - e).max(1e-9));
        at_worst.fold(0.0, f64::max)
    }

    fn of_runs(way: Way, runs: &[Vec<f64>]) -> Self {
        let of_member = |i: usize| mean_and_error(runs.iter().map(|speeds| speeds[i]));
        let (speeds, errors) = (0..runs[0].len()).map(of_member).unzip();
        let (_, sum_error) = mean_and_error(runs.iter().map(|speeds| speeds.iter().sum()));
        Self { way, speeds, errors, sum_error }
    }
}

/// The mean of at least one value, and its standard error.
fn mean_and_error(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let count = values.clone().count() as f64;
    let mean = values.clone().sum::<f64>() / count;
    let squares: f64 = values.map(|v| (v - mean) * (v - mean)).sum();
    (mean, (squares / (count - 1.0).max(1.0) / count).sqrt())
}

/// What a set has to fulfil to be run side by side.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Constraints {
    /// Largest slowdown relative to alone that any task may have.
    pub bound: f64,
    /// Smallest throughput of the set, relative to one task at a time.
    pub least: f64,
    /// Share of the unconfined throughput that a partition or priority may lose.
    pub loss: f64,
}

/// Why a set should not run side by side.
#[derive(Clone, Debug, PartialEq)]
pub enum Rejection {
    /// These tasks were not measured alone.
    Unknown(Vec<String>),
    /// In every configuration some task is slowed down by more than `bound`.
    TooSlow {
        /// The largest slowdown allowed.
        bound: f64,
        /// The smallest slowdown of the slowest task in any configuration.
        at_best: f64,
    },
    /// The best configuration within the bound has less throughput than the unconfined one.
    Loses {
        /// Throughput within the bound, less its standard error.
        sum: f64,
        /// Throughput unconfined.
        free: f64,
    },
    /// The throughput of the set is too small.
    NotWorth {
        /// The throughput required.
        least: f64,
        /// The throughput of the best configuration.
        sum: f64,
    },
}

impl std::fmt::Display for Rejection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unknown(names) => {
                write!(f, "not measured alone on the whole GPU: {}", names.join(", "))
            }
            Self::TooSlow { bound, at_best } => {
                write!(
                    f,
                    "in every configuration a task takes over {bound} times as long: \
                     {at_best:.2} at best"
                )
            }
            Self::Loses { sum, free } => {
                write!(
                    f,
                    "throughput within the bound is {sum:.2} or more, but {free:.2} unconfined"
                )
            }
            Self::NotWorth { least, sum } => {
                write!(f, "throughput is {sum:.2} of one task at a time, less than {least}")
            }
        }
    }
}

/// Advice for one set of tasks.
#[derive(Clone, Debug, PartialEq)]
pub struct Advice {
    /// The tasks.
    pub set: Vec<Workload>,
    /// Number of SMs of the GPU, where known.
    pub gpu: Option<u32>,
    /// The measured configurations: plain first, then by priority and partition.
    pub configurations: Vec<Configuration>,
    /// Index of the configuration to use, or why there is none.
    pub choice: Result<usize, Rejection>,
}

impl Advice {
    /// The configuration with every task on the whole GPU and none before others, if it was
    /// measured.
    pub fn unconfined(&self) -> Option<&Configuration> {
        self.configurations.iter().find(|w| w.way.is_plain())
    }

    /// The configuration with the highest throughput, whether it is chosen or not.
    pub fn most(&self) -> Option<&Configuration> {
        self.configurations.iter().max_by(|a, b| a.sum().total_cmp(&b.sum()))
    }
}

/// The speeds of each run.
type Ways = BTreeMap<Way, Vec<Vec<f64>>>;

/// Advice for each set that was measured in these sessions, by the names of its tasks; speeds are
/// relative to those of the same session.
pub fn advise(sessions: &[Vec<Row>], constraints: Constraints) -> Vec<Advice> {
    let all: Vec<&Row> = sessions.iter().flatten().collect();
    let gpu =
        all.iter().filter_map(|r| if let Row::Solo(s) = r { Some(s.sms) } else { None }).max();
    let anywhere = alone(all.iter().copied(), gpu);
    let mut sets: BTreeMap<Vec<Workload>, Ways> = BTreeMap::new();
    let mut unknown: BTreeMap<Vec<Workload>, BTreeSet<String>> = BTreeMap::new();
    for rows in sessions {
        let here = alone(rows.iter(), gpu);
        for mut sides in rows.iter().filter_map(|row| sides(row, gpu)) {
            // The same set may have been written in another order. Of equal tasks the slower is
            // first, so that a search knows it again once it has priority.
            sides.sort_by(|a, b| {
                let by_way = (b.sms, b.first).cmp(&(a.sms, a.first));
                a.workload.cmp(&b.workload).then(by_way).then(a.it_s.total_cmp(&b.it_s))
            });
            let set: Vec<Workload> = sides.iter().map(|s| s.workload.clone()).collect();
            let speed = |s: &Side| {
                Some(s.it_s / here.get(&s.workload).or_else(|| anywhere.get(&s.workload))?)
            };
            let configurations = sets.entry(set.clone()).or_default();
            let Some(speeds) = sides.iter().map(speed).collect::<Option<Vec<f64>>>() else {
                let strange = set.iter().filter(|w| !anywhere.contains_key(w));
                unknown.entry(set.clone()).or_default().extend(strange.map(|w| w.name.clone()));
                continue;
            };
            let way = Way {
                first: sides.iter().position(|s| s.first),
                sms: sides.iter().map(|s| s.sms).collect(),
            };
            configurations.entry(way).or_default().push(speeds);
        }
    }
    let advice = |(set, configurations): (Vec<Workload>, Ways)| {
        let configurations: Vec<Configuration> = configurations
            .into_iter()
            .map(|(way, runs)| Configuration::of_runs(way, &runs))
            .collect();
        let choice = match unknown.remove(&set) {
            Some(names) if configurations.is_empty() => {
                Err(Rejection::Unknown(names.into_iter().collect()))
            }
            _ => choose(&configurations, constraints),
        };
        Advice { set, gpu, configurations, choice }
    };
    sets.into_iter().map(advice).collect()
}

/// Relative difference between repeated measurements: a way that is better than plainly by less is
/// not better.
const NOISE: f64 = 0.03;

/// The best of some configurations, at least one.
fn choose(
    configurations: &[Configuration],
    Constraints { bound, least, loss }: Constraints,
) -> Result<usize, Rejection> {
    let free = configurations.iter().find(|w| w.way.is_plain()).map_or(0.0, Configuration::sum);
    let allowed = || configurations.iter().enumerate().filter(|(_, w)| w.slowest() <= bound);
    let worth = |w: &Configuration| {
        if w.way.is_plain() { w.sum() * (1.0 + NOISE) } else { w.sum() - w.sum_error }
    };
    let loses = |w: &Configuration| worth(w) < free * (1.0 - loss);
    let better = |a: &(usize, &Configuration), b: &(usize, &Configuration)| {
        worth(a.1).total_cmp(&worth(b.1))
    };
    // The first of equals: plainly, if that is as good.
    let Some((i, best)) = allowed().rev().max_by(better) else {
        let at_best =
            configurations.iter().map(Configuration::slowest).fold(f64::INFINITY, f64::min);
        return Err(Rejection::TooSlow { bound, at_best });
    };
    let sum = best.sum();
    if sum < least {
        Err(Rejection::NotWorth { least, sum })
    } else if loses(best) {
        Err(Rejection::Loses { sum: worth(best), free })
    } else {
        Ok(i)
    }
}

/// One task of a row.
struct Side {
    workload: Workload,
    sms: Option<u32>,
    /// Whether it had priority.
    first: bool,
    it_s: f64,
}

/// The tasks of a row in which all run as fast as they can; `None` for other rows.
fn sides(row: &Row, gpu: Option<u32>) -> Option<Vec<Side>> {
    let side = |name: &str, batch, kind, sms, it_s| Side {
        workload: Workload { name: name.into(), batch, kind },
        sms,
        first: false,
        it_s,
    };
    let (mut sides, first) = match row {
        Row::Trainings(r) => {
            let a = side(&r.a, r.batch_a, TaskKind::Train, r.sms_a, r.ra.it_s);
            (vec![a, side(&r.b, r.batch_b, TaskKind::Train, r.sms_b, r.rb.it_s)], r.first)
        }
        Row::Group(r) => {
            let sms = |i: usize| r.sms.as_ref().map(|sms| sms[i]);
            let each = r.tasks.iter().zip(&r.batches).zip(&r.r).enumerate();
            let one = |(i, ((t, b), r)): (usize, ((&String, &u32), &Rate))| {
                side(t, *b, TaskKind::Train, sms(i), r.it_s)
            };
            (each.map(one).collect(), r.first)
        }
        Row::Closed(r) => {
            let whole = [r.sms_a, r.sms_b].iter().all(|sms| Some(*sms) >= gpu);
            let part = |sms| if whole { None } else { Some(sms) };
            let a = side(&r.a, r.batch_a, TaskKind::Train, part(r.sms_a), r.ra.it_s);
            (vec![a, side(&r.b, r.batch_b, TaskKind::Serve, part(r.sms_b), r.rb.it_s)], None)
        }
        Row::Solo(_) | Row::Alone(_) | Row::Mixed(_) => return None,
    };
    if let Some(i) = first {
        sides[i].first = true;
    }
    Some(sides)
}

/// Steps per second alone on the whole GPU; the fastest of several runs, because a task alone is
/// only ever disturbed towards slower.
fn alone<'a>(rows: impl Iterator<Item = &'a Row>, gpu: Option<u32>) -> BTreeMap<Workload, f64> {
    let mut known: BTreeMap<Workload, f64> = BTreeMap::new();
    for row in rows {
        let (workload, it_s) = match row {
            Row::Solo(s) if Some(s.sms) == gpu => {
                (Workload { name: s.name.clone(), batch: s.batch, kind: s.kind }, s.it_s)
            }
            Row::Alone(s) => {
                (Workload { name: s.a.clone(), batch: s.batch, kind: TaskKind::Train }, s.it_s)
            }
            _ => continue,
        };
        let fastest = known.entry(workload).or_insert(it_s);
        *fastest = fastest.max(it_s);
    }
    known
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measurement::rows::parse;

    const ALONE: &str = r#"
        {"kind":"train","name":"a","batch":8,"sms":132,"mem_mib":1,"it_s":10}
        {"kind":"train","name":"a","batch":8,"sms":48,"mem_mib":1,"it_s":9}
        {"kind":"train","name":"b","batch":4,"sms":132,"mem_mib":1,"it_s":100}
        {"kind":"serve","name":"s","batch":1,"sms":132,"mem_mib":1,"it_s":50}"#;

    const TERMS: Constraints = Constraints { bound: 1.5, least: 1.1, loss: 0.0 };

    fn advice(rows: &str) -> Vec<Advice> {
        advise(&[parse(&format!("{ALONE}\n{rows}")).unwrap()], TERMS)
    }

    fn tt(a: f64, b: f64, more: &str) -> String {
        format!(
            r#"{{"k":"tt","a":"a","batch_a":8,"b":"b","batch_b":4,"ra":{{"it_s":{a}}},"rb":{{"it_s":{b}}}{more}}}{}"#,
            "\n"
        )
    }

    #[test]
    fn the_highest_throughput_within_the_bound_wins() {
        // Unconfined, b takes twice as long; the larger sum of the split is allowed.
        let rows = tt(9.0, 50.0, "")
            + &tt(7.0, 80.0, r#","sms_a":48,"sms_b":84"#)
            + &tt(7.0, 70.0, r#","sms_a":64,"sms_b":68"#);
        let [one] = &advice(&rows)[..] else { panic!("one set") };
        assert_eq!(one.unconfined().map(Configuration::sum), Some(1.4));
        assert_eq!(one.choice, Ok(1));
        assert_eq!(one.configurations[1].way.sms, Some(vec![48, 84]));
        assert_eq!(one.configurations[1].speeds, [0.7, 0.8]);
    }

    #[test]
    fn sets_not_worth_sharing_are_declined() {
        let said = |rows: &str| advice(rows)[0].choice.clone().unwrap_err().to_string();
        let together = said(&tt(7.0, 35.0, ""));
        assert_eq!(
            together,
            "in every configuration a task takes over 1.5 times as long: 2.86 at best"
        );
        let twin = r#"{"k":"ttt","tasks":["a"],"batches":[8],"r":[{"it_s":9}]}"#;
        assert_eq!(said(twin), "throughput is 0.90 of one task at a time, less than 1.1");
        let strange = tt(7.0, 35.0, "").replace(r#""b":"b""#, r#""b":"c""#);
        assert_eq!(said(&strange), "not measured alone on the whole GPU: c");
    }

    #[test]
    fn a_bound_that_costs_throughput_is_declined() {
        // Unconfined, b takes twice as long at a throughput of 1.45; within the bound it is 1.4.
        let rows = tt(9.5, 50.0, "") + &tt(7.0, 70.0, r#","sms_a":64,"sms_b":68"#);
        let [one] = &advice(&rows)[..] else { panic!("one set") };
        let said = one.choice.clone().unwrap_err().to_string();
        assert_eq!(said, "throughput within the bound is 1.40 or more, but 1.45 unconfined");
        let session = parse(&format!("{ALONE}\n{rows}")).unwrap();
        let lenient = advise(&[session], Constraints { loss: 0.05, ..TERMS });
        assert_eq!(lenient[0].choice, Ok(1));
    }

    #[test]
    fn priority_is_a_way_of_its_own() {
        // As measured: bert beside vit, plainly and with bert first.
        let rows = tt(6.1, 81.0, "")
            + &tt(7.8, 69.0, r#","first":0"#)
            + &tt(7.2, 70.0, r#","sms_a":132,"sms_b":96,"first":0"#);
        let [one] = &advice(&rows)[..] else { panic!("one set") };
        assert_eq!(one.unconfined().map(|w| w.speeds.clone()), Some(vec![0.61, 0.81]));
        assert_eq!(one.choice, Ok(1));
        let first = Way { first: Some(0), sms: None };
        assert_eq!(one.configurations[1].way, first);
        assert_eq!(one.configurations[2].way, Way { sms: Some(vec![132, 96]), ..first });
        // The index is that of the sorted set.
        let turned = r#"{"k":"tt","a":"b","batch_a":4,"b":"a","batch_b":8,"first":1,"ra":{"it_s":69},"rb":{"it_s":7.8}}"#;
        let [same] = &advice(&(tt(6.1, 81.0, "") + turned))[..] else { panic!("one set") };
        assert_eq!(same.configurations[..], one.configurations[..2]);
        // Two of a kind: it does not matter which of them had it.
        let twins = r#"{"k":"tt","a":"a","batch_a":8,"b":"a","batch_b":8,"first":1,"ra":{"it_s":5},"rb":{"it_s":8}}"#;
        let [twins] = &advice(twins)[..] else { panic!("one set") };
        assert_eq!(twins.configurations[0].way.first, Some(0));
        assert_eq!(twins.configurations[0].speeds, [0.8, 0.5]);
        let wrong = parse(&tt(1.0, 1.0, r#","first":2"#)).unwrap_err().to_string();
        assert_eq!(wrong, "line 1: first is 2, expected the index of one of 2 tasks");
    }

    #[test]
    fn the_same_set_in_another_order_is_the_same() {
        let turned = r#"{"k":"tt","a":"b","batch_a":4,"b":"a","batch_b":8,"sms_a":92,"sms_b":40,"ra":{"it_s":80},"rb":{"it_s":8}}"#;
        let [one] = &advice(&(tt(8.0, 60.0, "") + turned))[..] else { panic!("one set") };
        assert_eq!(one.configurations[1].way.sms, Some(vec![40, 92]));
        assert_eq!(one.choice, Ok(1));
        // Two runs of the same configuration count as their mean.
        let [again] = &advice(&(tt(8.0, 60.0, "") + &tt(6.0, 80.0, "")))[..] else { panic!("one") };
        assert_eq!(again.configurations[0].speeds, [0.7, 0.7]);
    }

    #[test]
    fn uncertain_measurements_count_one_error_worse() {
        let round = |n: u32, a: f64, b: f64, [c, d]: [f64; 2]| {
            let alone = ALONE.replace('}', &format!(r#","round":{n}}}"#));
            let with = |more: &str| format!(r#","round":{n}{more}"#);
            alone + "\n" + &tt(a, b, &with("")) + &tt(c, d, &with(r#","sms_a":48,"sms_b":84"#))
        };
        let choice = |text: &str| {
            let rounds = crate::measurement::rows::rounds(text).unwrap();
            assert_eq!(rounds.len(), 2);
            advise(&rounds, TERMS).remove(0)
        };
        // The partition is better by a tenth on average: in one run by much, in the other not at
        // all.
        let one = choice(&(round(0, 8.0, 80.0, [9.8, 98.0]) + &round(1, 8.0, 80.0, [8.0, 80.0])));
        assert_eq!(one.choice, Ok(0));
        assert!((one.configurations[1].sum() - 1.78).abs() < 1e-9);
        assert!((one.configurations[1].sum_error - 0.18).abs() < 1e-9);
        let sure = choice(&(round(0, 8.0, 80.0, [8.9, 89.0]) + &round(1, 8.0, 80.0, [8.9, 89.0])));
        assert_eq!(sure.choice, Ok(1));
        // On average a takes 1.47 times as long, which may be above the bound within its error.
        let late = choice(&(round(0, 6.3, 90.0, [1.0, 1.0]) + &round(1, 7.3, 90.0, [1.0, 1.0])));
        assert!(late.choice.is_err(), "{late:?}");
    }

    #[test]
    fn services_in_a_closed_loop_count_as_well() {
        let row = |sms: &str| {
            format!(
                r#"{{"k":"tc","a":"a","batch_a":8,"b":"s","batch_b":1,{sms},"ra":{{"it_s":8}},"rb":{{"it_s":40}}}}"#
            )
        };
        let rows = row(r#""sms_a":132,"sms_b":132"#) + "\n" + &row(r#""sms_a":48,"sms_b":84"#);
        let [one] = &advice(&rows)[..] else { panic!("one set") };
        assert_eq!(
            one.configurations.iter().map(|w| w.way.sms.clone()).collect::<Vec<_>>(),
            [None, Some(vec![48, 84])]
        );
        assert_eq!(one.choice, Ok(0));
    }
}
