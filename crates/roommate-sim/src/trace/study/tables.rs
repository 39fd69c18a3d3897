//! The tables of the study, and the columns that each needs.

use super::causes::DELAYED_S;
use super::{About, Case, Column, Figure, Group, Need, Table, Unit, figure};
use crate::trace::Status;
use crate::trace::stats::{CLASSES, Summary};
use std::collections::{BTreeMap, BTreeSet};

const TEAM: Need = Need { column: "team", has: |case| case.team.is_some() };
const QUEUE: Need = Need { column: "queue_s", has: |case| case.queue_s.is_some() };
const CAUSE: Need =
    Need { column: "fair_share_s (or team and --quota)", has: |case| case.fair_s.is_some() };
const MACHINES: Need = Need { column: "machines", has: |case| case.observed().machines > 0 };
const UTIL: Need = Need { column: "gpu_util", has: |case| case.observed().gpu_util.is_some() };
const STATUS: Need = Need { column: "status", has: |case| case.status.is_some() };
const ATTEMPTS: Need = Need { column: "attempts", has: |case| case.attempts > 0 };
const FAILURE: Need = Need { column: "failure", has: |case| case.observed().failure.is_some() };

/// Most teams and failure reasons listed by name; the study has 14 teams and 20 reasons.
const LISTED: usize = 20;

/// Sizes that the study reports individually.
const SIZES: [u32; 5] = [1, 2, 4, 8, 16];

/// All tables, in the order of the study.
pub(super) fn all(cases: &[Case<'_>]) -> Vec<Table> {
    vec![
        classes(cases),
        sizes(cases),
        teams(cases),
        queueing_by_class(cases),
        queueing_by_team(cases),
        causes_by_class(cases),
        causes_by_team(cases),
        queueing_by_locality(cases),
        utilisation(cases),
        utilisation_by_locality(cases),
        outcomes(cases),
        outcomes_by_size(cases),
        retries(cases),
        failures(cases),
    ]
}

const fn rows(key: &'static str, head: &'static str) -> Column {
    Column { key, head, unit: Unit::Name }
}

const CLASS: Column = rows("gpus", "GPUs");
const TEAMS: Column = rows("team", "team");

fn classes(cases: &[Case<'_>]) -> Table {
    let title = "Run time by job size";
    About { id: "run_time", title, rows: CLASS, needs: &[] }.table(cases, by_class, |all| {
        let mut figures = shares(all);
        figures.extend(times(|case| Some(case.duration_s)));
        figures
    })
}

fn sizes(cases: &[Case<'_>]) -> Table {
    let title = "Job sizes";
    About { id: "sizes", title, rows: CLASS, needs: &[] }.table(cases, by_size, shares)
}

fn teams(cases: &[Case<'_>]) -> Table {
    let title = "Virtual clusters";
    About { id: "teams", title, rows: TEAMS, needs: &[TEAM] }.table(cases, by_team, |all| {
        let mut figures = shares(all);
        figures.push(percentile("run_p50_s", "run p50", 0.5, |case| Some(case.duration_s)));
        figures
    })
}

fn queueing_by_class(cases: &[Case<'_>]) -> Table {
    let title = "Queueing delay by job size";
    About { id: "queueing_by_size", title, rows: CLASS, needs: &[QUEUE] }.table(
        cases,
        by_class,
        |_| queueing(),
    )
}

fn queueing_by_team(cases: &[Case<'_>]) -> Table {
    let title = "Queueing delay by virtual cluster";
    About { id: "queueing_by_team", title, rows: TEAMS, needs: &[QUEUE, TEAM] }.table(
        cases,
        by_team,
        |_| queueing(),
    )
}

fn causes_by_class(cases: &[Case<'_>]) -> Table {
    let title = "Causes of delay by job size";
    About { id: "causes_by_size", title, rows: CLASS, needs: &[QUEUE, CAUSE] }.table(
        cases,
        by_class,
        |_| causes(),
    )
}

fn causes_by_team(cases: &[Case<'_>]) -> Table {
    let title = "Causes of delay by virtual cluster";
    About { id: "causes_by_team", title, rows: TEAMS, needs: &[QUEUE, CAUSE, TEAM] }.table(
        cases,
        by_team,
        |_| causes(),
    )
}

fn queueing_by_locality(cases: &[Case<'_>]) -> Table {
    let title = "Queueing delay by machines that a job was spread over";
    About {
        id: "queueing_by_locality",
        title,
        rows: rows("spread", "GPUs on machines"),
        needs: &[QUEUE, MACHINES],
    }
    .table(cases, by_locality, |_| queueing())
}

fn utilisation(cases: &[Case<'_>]) -> Table {
    let title = "Utilisation of GPUs by job size and outcome, weighted by GPU time";
    About { id: "utilisation", title, rows: CLASS, needs: &[UTIL, STATUS] }.table(
        cases,
        by_size,
        |_| {
            let mean = |key, head, status: Option<Status>| {
                figure(key, head, Unit::Share, move |jobs| {
                    let inside = jobs.iter().filter(|c| status.is_none_or(|s| c.status == Some(s)));
                    weighted_util(inside)
                })
            };
            vec![
                figure("jobs", "jobs", Unit::Count, |jobs| Some(jobs.len() as f64)),
                mean("passed", "passed", Some(Status::Passed)),
                mean("killed", "killed", Some(Status::Killed)),
                mean("failed", "unsuccessful", Some(Status::Failed)),
                mean("all", "all", None),
            ]
        },
    )
}

fn utilisation_by_locality(cases: &[Case<'_>]) -> Table {
    let title = "Utilisation of GPUs by machines that a job was spread over";
    About {
        id: "utilisation_by_locality",
        title,
        rows: rows("spread", "GPUs on machines"),
        needs: &[UTIL, MACHINES],
    }
    .table(cases, by_exact_locality, |_| {
        let util = |case: &Case<'_>| case.observed().gpu_util;
        let at = |key, head, share| Figure {
            column: Column { key, head, unit: Unit::Share },
            ..percentile(key, head, share, util)
        };
        vec![
            figure("jobs", "jobs", Unit::Count, |jobs| Some(jobs.len() as f64)),
            figure("mean", "mean", Unit::Share, |jobs| weighted_util(jobs.iter())),
            at("p50", "p50", 0.50),
            at("p90", "p90", 0.90),
            at("p95", "p95", 0.95),
        ]
    })
}

fn outcomes(cases: &[Case<'_>]) -> Table {
    let title = "Outcome of jobs";
    About { id: "outcomes", title, rows: rows("outcome", "outcome"), needs: &[STATUS] }
        .table_of_all(cases, by_status, |all| {
            let mut figures = shares(all);
            figures.push(percentile("run_p50_s", "run p50", 0.5, |case| Some(case.duration_s)));
            figures.extend(attempts());
            figures
        })
}

fn outcomes_by_size(cases: &[Case<'_>]) -> Table {
    let title = "Outcome and retries by job size";
    About { id: "outcomes_by_size", title, rows: CLASS, needs: &[STATUS] }.table_of_all(
        cases,
        by_size,
        |all| {
            // While some final states are unknown, a status without jobs may be among them.
            let complete = |status| {
                let has = |wanted| all.iter().any(|case| case.status == wanted);
                has(status) || !has(None)
            };
            let of = |key, head, status: Option<Status>| {
                let complete = complete(status);
                let part = share(key, head, move |case: &Case<'_>| case.status == status);
                figure(key, head, Unit::Share, move |jobs| (part.of)(jobs).filter(|_| complete))
            };
            let mut figures = vec![
                figure("jobs", "jobs", Unit::Count, |jobs| Some(jobs.len() as f64)),
                of("passed", "passed", Some(Status::Passed)),
                of("killed", "killed", Some(Status::Killed)),
                of("failed", "unsuccessful", Some(Status::Failed)),
                of("unknown", "unknown", None),
            ];
            figures.extend(attempts());
            figures
        },
    )
}

fn retries(cases: &[Case<'_>]) -> Table {
    let title = "Attempts";
    About { id: "retries", title, rows: rows("attempts", "attempts"), needs: &[ATTEMPTS, STATUS] }
        .table(cases, by_attempts, |all| {
            let mut figures = shares(all);
            for (key, head, status) in [
                ("passed", "passed", Status::Passed),
                ("killed", "killed", Status::Killed),
                ("failed", "unsuccessful", Status::Failed),
            ] {
                figures.push(share(key, head, move |case| case.status == Some(status)));
            }
            figures
        })
}

fn failures(cases: &[Case<'_>]) -> Table {
    let title = "Reasons of failures, time to failure as the mean of a job's attempts";
    About { id: "failures", title, rows: rows("reason", "reason"), needs: &[FAILURE] }.table(
        cases,
        by_failure,
        |all| {
            let total: f64 = all.iter().map(Case::gpu_s).sum();
            let trials = |case: &Case<'_>| f64::from(case.attempts.max(1));
            let to_failure = move |case: &Case<'_>| Some(case.duration_s / trials(case));
            vec![
                figure("trials", "trials", Unit::Count, move |jobs| {
                    Some(jobs.iter().map(trials).sum())
                }),
                figure("jobs", "jobs", Unit::Count, |jobs| Some(jobs.len() as f64)),
                figure("users", "users", Unit::Count, |jobs| {
                    let users: BTreeSet<&str> =
                        jobs.iter().filter_map(|case| case.job.user.as_deref()).collect();
                    (!users.is_empty()).then_some(users.len() as f64)
                }),
                percentile("p50_s", "p50", 0.50, to_failure),
                percentile("p90_s", "p90", 0.90, to_failure),
                percentile("p95_s", "p95", 0.95, to_failure),
                part_of_time(total),
            ]
        },
    )
}

impl About {
    /// A table that also has jobs without the value, in a row of their own.
    fn table_of_all<'a>(
        self,
        all: &[Case<'a>],
        groups: impl FnOnce(&[Case<'a>]) -> Vec<Group<'a>>,
        figures: impl FnOnce(&[Case<'a>]) -> Vec<Figure>,
    ) -> Table {
        let some = all.iter().any(|case| self.needs.iter().all(|need| (need.has)(case)));
        let needs = if some { &[] } else { self.needs };
        About { needs, ..self }.table(all, groups, figures)
    }
}

// ---- columns ----

/// Number of jobs and their share of all jobs.
fn shares(all: &[Case<'_>]) -> Vec<Figure> {
    let (jobs, time) = (all.len() as f64, all.iter().map(Case::gpu_s).sum());
    vec![
        figure("jobs", "jobs", Unit::Count, |jobs| Some(jobs.len() as f64)),
        figure("of_jobs", "of jobs", Unit::Share, move |inside| Some(inside.len() as f64 / jobs)),
        part_of_time(time),
    ]
}

fn part_of_time(total: f64) -> Figure {
    figure("of_gpu_time", "of GPU time", Unit::Share, move |jobs| {
        (total > 0.0).then(|| jobs.iter().map(Case::gpu_s).sum::<f64>() / total)
    })
}

fn share(
    key: &'static str,
    head: &'static str,
    has: impl Fn(&Case<'_>) -> bool + 'static,
) -> Figure {
    figure(key, head, Unit::Share, move |jobs| {
        let inside = jobs.iter().filter(|case| has(case)).count();
        (!jobs.is_empty()).then(|| inside as f64 / jobs.len() as f64)
    })
}

fn percentile(
    key: &'static str,
    head: &'static str,
    rank: f64,
    value: impl Fn(&Case<'_>) -> Option<f64> + 'static,
) -> Figure {
    figure(key, head, Unit::Seconds, move |jobs| {
        let mut values: Vec<f64> = jobs.iter().filter_map(&value).collect();
        values.sort_by(f64::total_cmp);
        values.get(((rank * values.len() as f64).ceil() as usize).max(1) - 1).copied()
    })
}

fn mean(
    key: &'static str,
    head: &'static str,
    unit: Unit,
    value: impl Fn(&Case<'_>) -> Option<f64> + 'static,
) -> Figure {
    figure(key, head, unit, move |jobs| {
        Summary::new(jobs.iter().filter_map(&value).collect()).map(|summary| summary.mean)
    })
}

fn times(value: fn(&Case<'_>) -> Option<f64>) -> [Figure; 4] {
    [
        percentile("p50_s", "p50", 0.50, value),
        percentile("p90_s", "p90", 0.90, value),
        percentile("p95_s", "p95", 0.95, value),
        mean("mean_s", "mean", Unit::Seconds, value),
    ]
}

fn queueing() -> Vec<Figure> {
    let wait = |case: &Case<'_>| case.queue_s;
    let longer = |limit: f64| move |case: &Case<'_>| case.queue_s.is_some_and(|s| s > limit);
    let mut figures = vec![figure("jobs", "jobs", Unit::Count, |jobs| Some(jobs.len() as f64))];
    figures.extend(times(wait));
    figures.push(share("over_1_min", "over 1 min", longer(DELAYED_S)));
    figures.push(share("over_10_min", "over 10 min", longer(600.0)));
    figures
}

/// Of the delayed jobs: how many have each cause as their larger part, and the shares of the total
/// delay.
fn causes() -> Vec<Figure> {
    fn delayed<'s, 'a>(jobs: &'s [Case<'a>]) -> impl Iterator<Item = (f64, f64)> + use<'s, 'a> {
        let parts = |case: &Case<'_>| Some((case.fair_s?, case.queue_s?));
        jobs.iter().filter_map(parts).filter(|(_, wait)| *wait > DELAYED_S)
    }
    let label = |key, head, fair_share: bool| {
        figure(key, head, Unit::Share, move |jobs| {
            let all = delayed(jobs).count();
            let fair = delayed(jobs).filter(|(fair, wait)| fair * 2.0 > *wait).count();
            let inside = if fair_share { fair } else { all - fair };
            (all > 0).then(|| inside as f64 / all as f64)
        })
    };
    let part = |key, head, fair_share: bool| {
        figure(key, head, Unit::Share, move |jobs| {
            let all: f64 = delayed(jobs).map(|(_, wait)| wait).sum();
            let fair: f64 = delayed(jobs).map(|(fair, _)| fair).sum();
            (all > 0.0).then(|| if fair_share { fair / all } else { 1.0 - fair / all })
        })
    };
    vec![
        figure("delayed", "delayed jobs", Unit::Count, |jobs| Some(delayed(jobs).count() as f64)),
        label("fair_share", "fair share", true),
        label("fragmentation", "fragmentation", false),
        part("fair_share_time", "of time: fair share", true),
        part("fragmentation_time", "fragmentation", false),
    ]
}

fn attempts() -> [Figure; 2] {
    let tries = |case: &Case<'_>| (case.attempts > 0).then_some(f64::from(case.attempts));
    [
        mean("mean_attempts", "attempts", Unit::Number, tries),
        figure("retried", "retried", Unit::Share, move |jobs| {
            let known = jobs.iter().filter(|case| case.attempts > 0).count();
            let again = jobs.iter().filter(|case| case.attempts > 1).count();
            (known > 0).then(|| again as f64 / known as f64)
        }),
    ]
}

/// Weighted by GPU time, like the study's samples per minute.
fn weighted_util<'c, 'a: 'c>(jobs: impl Iterator<Item = &'c Case<'a>>) -> Option<f64> {
    let (mut busy, mut time) = (0.0, 0.0);
    for case in jobs {
        busy += case.observed().gpu_util? * case.gpu_s();
        time += case.gpu_s();
    }
    (time > 0.0).then(|| busy / time)
}

// ---- rows ----

fn with_all<'a>(mut groups: Vec<Group<'a>>, all: &[Case<'a>]) -> Vec<Group<'a>> {
    groups.retain(|(_, jobs)| !jobs.is_empty());
    groups.push(("all".into(), all.to_vec()));
    groups
}

fn pick<'a>(all: &[Case<'a>], inside: impl Fn(&Case<'a>) -> bool) -> Vec<Case<'a>> {
    all.iter().filter(|case| inside(case)).copied().collect()
}

fn class(gpus: u32) -> usize {
    CLASSES.iter().position(|(_, largest)| gpus <= *largest).unwrap_or(CLASSES.len() - 1)
}

fn by_class<'a>(all: &[Case<'a>]) -> Vec<Group<'a>> {
    let of = |i: usize| (CLASSES[i].0.into(), pick(all, |case| class(case.gpus) == i));
    with_all((0..CLASSES.len()).map(of).collect(), all)
}

fn by_size<'a>(all: &[Case<'a>]) -> Vec<Group<'a>> {
    let exact = |size: u32| (size.to_string(), pick(all, |case| case.gpus == size));
    let mut groups: Vec<Group<'a>> = SIZES.into_iter().map(exact).collect();
    groups.push(("32 and more".into(), pick(all, |case| case.gpus >= 32)));
    groups.push(("other".into(), pick(all, |case| case.gpus < 32 && !SIZES.contains(&case.gpus))));
    with_all(groups, all)
}

/// One group for each name, largest GPU time first; the rest as one group.
fn by_name<'a>(all: &[Case<'a>], name: impl Fn(&Case<'a>) -> Option<&'a str>) -> Vec<Group<'a>> {
    let mut named: BTreeMap<&str, Vec<Case<'a>>> = BTreeMap::new();
    for case in all {
        if let Some(name) = name(case) {
            named.entry(name).or_default().push(*case);
        }
    }
    let time = |jobs: &[Case<'a>]| jobs.iter().map(Case::gpu_s).sum::<f64>();
    let mut groups: Vec<Group<'a>> = named.into_iter().map(|(n, jobs)| (n.into(), jobs)).collect();
    groups.sort_by(|a, b| time(&b.1).total_cmp(&time(&a.1)));
    let rest = groups.split_off(groups.len().min(LISTED));
    if !rest.is_empty() {
        let name = format!("{} more", rest.len());
        groups.push((name, rest.into_iter().flat_map(|(_, jobs)| jobs).collect()));
    }
    with_all(groups, all)
}

fn by_team<'a>(all: &[Case<'a>]) -> Vec<Group<'a>> {
    by_name(all, |case| case.job.team.as_deref())
}

fn by_failure<'a>(all: &[Case<'a>]) -> Vec<Group<'a>> {
    by_name(all, |case| case.job.observed().failure.as_deref())
}

fn by_status<'a>(all: &[Case<'a>]) -> Vec<Group<'a>> {
    let of = |status: Option<Status>| {
        let name = match status {
            Some(Status::Failed) => "unsuccessful",
            Some(status) => status.name(),
            None => "unknown",
        };
        (name.into(), pick(all, |case| case.status == status))
    };
    with_all(Status::ALL.iter().copied().map(Some).chain([None]).map(of).collect(), all)
}

fn by_attempts<'a>(all: &[Case<'a>]) -> Vec<Group<'a>> {
    let mut groups: Vec<Group<'a>> =
        (1..=4).map(|n: u32| (n.to_string(), pick(all, |case| case.attempts == n))).collect();
    groups.push(("5 and more".into(), pick(all, |case| case.attempts >= 5)));
    with_all(groups, all)
}

/// Gangs by size class and machines.
fn by_locality<'a>(all: &[Case<'a>]) -> Vec<Group<'a>> {
    const SPREADS: [(&str, u32, u32); 6] = [
        ("1", 1, 1),
        ("2", 2, 2),
        ("3-4", 3, 4),
        ("5-8", 5, 8),
        ("9-16", 9, 16),
        (">16", 17, u32::MAX),
    ];
    let mut groups = Vec::new();
    for (i, (class_name, _)) in CLASSES.iter().enumerate().skip(1) {
        for (spread, from, to) in SPREADS {
            let inside = |case: &Case<'_>| {
                class(case.gpus) == i && (from..=to).contains(&case.observed().machines)
            };
            groups.push((format!("{class_name} on {spread}"), pick(all, inside)));
        }
    }
    groups.retain(|(_, jobs)| !jobs.is_empty());
    groups
}

/// Gangs of the study's sizes by the number of machines.
fn by_exact_locality<'a>(all: &[Case<'a>]) -> Vec<Group<'a>> {
    let mut groups: BTreeMap<(u32, u32), Vec<Case<'a>>> = BTreeMap::new();
    for case in all.iter().filter(|case| case.gpus > 1 && SIZES.contains(&case.gpus)) {
        groups.entry((case.gpus, case.observed().machines)).or_default().push(*case);
    }
    groups.into_iter().map(|((gpus, on), jobs)| (format!("{gpus} on {on}"), jobs)).collect()
}
