//! What follows from a comparison, in sentences that say no more than its intervals do.

use super::{Interval, Standing, UnderTruth, Verdict};

/// Below this share, a change of policy is not worth its trouble.
const WORTH: f64 = 0.01;

/// From this ratio on, the recorded wait and the simulated one do not fit each other.
const UNLIKE: f64 = 2.0;
/// Waits below a minute always fit.
const SHORT_S: f64 = 60.0;

/// Whether the completion times of two policies do not differ.
type Equals<'a> = &'a dyn Fn(&Standing, &Standing) -> bool;

/// The sentences; the first of the policies is today's, the others are sorted.
pub(super) fn advice(
    policies: &[Standing],
    equals: Equals<'_>,
    bound_s: Option<f64>,
    recorded_wait_s: Option<f64>,
) -> Vec<String> {
    let Some((today, others)) = policies.split_first() else { return Vec::new() };
    let best = |is: fn(Verdict) -> bool| {
        others.iter().find(|one| is(one.verdict) && one.sooner.mean >= WORTH)
    };
    let sure = best(|verdict| verdict == Verdict::Sooner);
    let likely = best(|verdict| matches!(verdict, Verdict::Sooner | Verdict::SoonerOrEqual));
    let mut said = match (likely, sure) {
        (Some(likely), sure) if likely.verdict == Verdict::SoonerOrEqual => {
            let mut said = conditional(likely, today);
            said.extend(equal(likely, others, equals));
            said.extend(sure.map(|sure| whichever(sure, today)));
            said
        }
        (Some(best), _) => recommended(best, today, others, equals),
        (None, _) => kept(today, others),
    };
    said.extend(bound(today, bound_s));
    said.extend(unfinished(others));
    said.extend(unlike(today, recorded_wait_s));
    said
}

/// A share in percent with the digits that matter.
pub fn percent(share: f64) -> String {
    let value = share * 100.0;
    let text = if value.abs() < 9.95 { format!("{value:.1}") } else { format!("{value:.0}") };
    // No "-0.0".
    let zero = text.trim_start_matches('-').chars().all(|c| c == '0' || c == '.');
    format!("{} %", if zero { "0" } else { &text }).replace('-', "−")
}

fn range(interval: &Interval) -> String {
    format!("{} to {}", percent(interval.low), percent(interval.high))
}

fn recommended(
    best: &Standing,
    today: &Standing,
    others: &[Standing],
    equals: Equals<'_>,
) -> Vec<String> {
    let mut said = vec![format!(
        "Use {}: jobs would have finished {} sooner on average than with {} ({}).",
        best.policy,
        percent(best.sooner.mean),
        today.policy,
        range(&best.sooner)
    )];
    said.extend(equal(best, others, equals));
    said.extend(costs(best));
    said
}

/// A policy that saves under some truths and makes no difference under the others.
fn conditional(best: &Standing, today: &Standing) -> Vec<String> {
    let (saves, equal): (Vec<&UnderTruth>, Vec<&UnderTruth>) =
        best.by_truth.iter().partition(|one| one.sooner.low > 0.0);
    let names = |of: &[&UnderTruth]| {
        of.iter().map(|one| one.truth.as_str()).collect::<Vec<_>>().join(" or ")
    };
    let under = |of: &[&UnderTruth]| {
        let sum: f64 = of.iter().map(|one| one.sooner.mean).sum();
        Interval {
            mean: sum / of.len() as f64,
            low: of.iter().map(|one| one.sooner.low).fold(f64::INFINITY, f64::min),
            high: of.iter().map(|one| one.sooner.high).fold(f64::NEG_INFINITY, f64::max),
        }
    };
    let saved = under(&saves);
    let mut said = vec![
        format!(
            "Use {} if the truth is {}: jobs would have finished {} sooner on average than with {} \
             ({}).",
            best.policy,
            names(&saves),
            percent(saved.mean),
            today.policy,
            range(&saved)
        ),
        format!(
            "If it is {}, there is no difference that these seeds can show ({}).",
            names(&equal),
            range(&under(&equal))
        ),
    ];
    said.extend(costs(best));
    said
}

/// What is sure to save, beside something that saves more but not always.
fn whichever(sure: &Standing, today: &Standing) -> String {
    format!(
        "Whichever truth is right, {} would have made them finish {} sooner than {} ({}).",
        sure.policy,
        percent(sure.sooner.mean),
        today.policy,
        range(&sure.sooner)
    )
}

/// The policies that do as well.
fn equal(best: &Standing, others: &[Standing], equals: Equals<'_>) -> Option<String> {
    let like = |one: &&Standing| {
        one.policy != best.policy && one.verdict != Verdict::Unfinished && equals(one, best)
    };
    let same: Vec<&str> = others.iter().filter(like).map(|one| one.policy.as_str()).collect();
    (!same.is_empty()).then(|| {
        let (names, best) = (listed(&same), &best.policy);
        format!("Between {best} and {names} there is no difference that these seeds can show.")
    })
}

/// What else is to be said of a policy: GPU time, the slowest jobs, what it has to know.
fn costs(best: &Standing) -> Vec<String> {
    let mut said = vec![gpu_time(best)];
    let p99 = &best.p99_sooner;
    said.push(match p99 {
        p99 if p99.low > 0.0 => {
            format!("Its 99th percentile of completion times is {} shorter.", percent(p99.mean))
        }
        p99 if p99.high < 0.0 => {
            format!("Its 99th percentile of completion times is {} longer.", percent(-p99.mean))
        }
        _ => format!(
            "In the 99th percentile of completion times there is no difference that holds under \
             every truth ({}).",
            range(p99)
        ),
    });
    if best.knows_durations {
        said.push(format!("{} has to be told how long jobs take.", best.policy));
    }
    said
}

fn gpu_time(best: &Standing) -> String {
    let [mean, low, high] = [best.saved_gpu_hours, best.low, best.high];
    if low > 0.0 {
        let (mean, low, high) = (hours(mean), hours(low), hours(high));
        return format!("The same work would have held {mean} GPU-hours less ({low} to {high}).");
    }
    if high < 0.0 {
        let (mean, low, high) = (hours(-mean), hours(-high), hours(-low));
        return format!("The same work would have held {mean} GPU-hours more ({low} to {high}).");
    }
    format!(
        "In GPU time there is no difference that holds under every truth ({} to {} GPU-hours \
         saved).",
        hours(low),
        hours(high)
    )
}

/// GPU-hours with the digits that matter.
pub fn hours(value: f64) -> String {
    let text = if value.abs() < 99.5 { format!("{value:.1}") } else { format!("{value:.0}") };
    let zero = text.trim_start_matches('-').chars().all(|c| c == '0' || c == '.');
    if zero { "0".to_owned() } else { text.replace('-', "−") }
}

fn kept(today: &Standing, others: &[Standing]) -> Vec<String> {
    let mut said = vec![format!(
        "Keep {}: none of the other policies is sure to make jobs finish sooner.",
        today.policy
    )];
    let comparable = |one: &&Standing| one.verdict != Verdict::Unfinished;
    let Some(best) = others.iter().find(comparable) else { return said };
    let range = range(&best.sooner);
    let name = &best.policy;
    said.push(match best.verdict {
        Verdict::Sooner | Verdict::SoonerOrEqual => {
            format!("{name} comes closest, but makes less than 1 % of difference ({range}).")
        }
        Verdict::Depends => {
            let saves = best.by_truth.iter().filter(|one| one.sooner.low > 0.0);
            let truths: Vec<&str> = saves.map(|one| one.truth.as_str()).collect();
            format!(
                "{name} comes closest: sooner if the truth is {}, but later if it is another \
                 ({range}).",
                truths.join(" or ")
            )
        }
        Verdict::Later => {
            format!("Even the best of them, {name}, makes them finish later ({range}).")
        }
        _ => format!(
            "{name} comes closest: no difference that these seeds and truths can show ({range})."
        ),
    });
    said
}

fn bound(today: &Standing, bound_s: Option<f64>) -> Option<String> {
    let left = 1.0 - bound_s.filter(|_| today.mean_jct_s > 0.0)? / today.mean_jct_s;
    Some(format!(
        "No policy at all could have made jobs finish more than {} sooner.",
        percent(left.max(0.0))
    ))
}

fn unfinished(others: &[Standing]) -> Option<String> {
    let some = others.iter().filter(|one| one.verdict == Verdict::Unfinished);
    let names: Vec<&str> = some.map(|one| one.policy.as_str()).collect();
    let what = "did not finish all jobs, so that their times do not compare";
    (!names.is_empty()).then(|| format!("Policies left out: {} {what}.", listed(&names)))
}

/// Warns where the simulated past is unlike the recorded one.
fn unlike(today: &Standing, recorded_wait_s: Option<f64>) -> Option<String> {
    let (recorded, simulated) = (recorded_wait_s?, today.mean_wait_s);
    let fits = recorded.max(SHORT_S) <= UNLIKE * simulated.max(SHORT_S)
        && simulated.max(SHORT_S) <= UNLIKE * recorded.max(SHORT_S);
    (!fits).then(|| {
        format!(
            "Be careful: jobs waited {} on average in the history, and {} with {} in the \
             simulation, so that the assumed cluster, or today's policy, is unlike yours.",
            minutes(recorded),
            minutes(simulated),
            today.policy
        )
    })
}

fn minutes(seconds: f64) -> String {
    match seconds {
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7_200.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3_600.0),
    }
}

fn listed(names: &[&str]) -> String {
    match names {
        [one] => (*one).to_owned(),
        [before @ .., last] => format!("{} and {last}", before.join(", ")),
        [] => String::new(),
    }
}
