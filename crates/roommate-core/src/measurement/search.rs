//! Which way to share a GPU to try next for tasks that were measured side by side: where a task is
//! slowed down too much, it gets priority, and the others are confined to fewer SMs until it is
//! not, or until they are.

use crate::measurement::advice::{Configuration, Way};

/// Partitions consist of groups of this many SMs.
pub const GRAIN: u32 = 8;
/// SMs of the smallest partition that is tried.
pub const LEAST: u32 = 32;
/// Below this slowdown nothing can help.
const MIN_SLOWDOWN: f64 = 1.1;
/// No way gets more done than this many times the plain throughput.
const MAX_GAIN: f64 = 1.2;
/// Factor by which the victim has to exceed its required speed, so that it still does when measured
/// again.
const SPEED_MARGIN: f64 = 1.03;

/// What to search for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Search {
    /// Number of SMs of the GPU.
    pub gpu: u32,
    /// Largest slowdown relative to alone that any task may have.
    pub bound: f64,
    /// Largest number of ways tried for a set.
    pub tries: usize,
    /// Whether tasks can have priority.
    pub priority: bool,
}

/// Where the victim runs.
#[derive(Clone, Copy, PartialEq)]
enum Victim {
    /// On all SMs.
    Everywhere,
    /// On the SMs that the others do not have.
    Apart,
}

/// Ways that differ in one number: the SMs to which all tasks but the victim are confined.
#[derive(Clone, Copy)]
struct Family {
    victim: usize,
    runs: Victim,
    /// The task with priority.
    first: Option<usize>,
    /// Whether it begins with the others unconfined; otherwise that is not worth a try.
    from_whole: bool,
}

/// Result for a set with the other tasks confined to `others_in` SMs.
#[derive(Clone, Copy)]
struct Point {
    others_in: u32,
    victim: f64,
    /// Speed of the slowest of the others.
    others: f64,
}

impl Search {
    /// The way to try next; `None` if nothing more is likely to help. The configurations have to
    /// include the plain one.
    pub fn next(&self, configurations: &[Configuration]) -> Option<Way> {
        let free = configurations.iter().find(|w| w.way.is_plain())?;
        let members = free.speeds.len();
        let out_of_reach = MAX_GAIN * free.sum() * self.bound < members as f64;
        let slowest = (0..members).min_by(|a, b| free.speeds[*a].total_cmp(&free.speeds[*b]))?;
        let tried = configurations.len() - 1;
        if tried >= self.tries || out_of_reach || free.speeds[slowest] * MIN_SLOWDOWN >= 1.0 {
            return None;
        }
        self.families(members, slowest).into_iter().find_map(|family| {
            let points = configurations.iter().filter_map(|w| self.point(w, family));
            let mut points: Vec<Point> = points.collect();
            points.sort_by_key(|p| p.others_in);
            if points.is_empty() && family.from_whole {
                return Some(Way { first: family.first, sms: None });
            }
            let others_in = self.others_in(&points, family.runs)?;
            let apart = family.runs == Victim::Apart;
            let mut parts = vec![others_in; members];
            parts[family.victim] = if apart { self.gpu - others_in } else { self.gpu };
            Some(Way { first: family.first, sms: Some(parts) })
        })
    }

    /// In the order in which they are tried.
    fn families(&self, members: usize, slowest: usize) -> Vec<Family> {
        let mut families = Vec::new();
        let held =
            Family { victim: slowest, runs: Victim::Everywhere, first: None, from_whole: false };
        let others = (0..members).filter(|i| *i != slowest);
        if self.priority {
            families.push(Family { first: Some(slowest), from_whole: true, ..held });
            if members == 2 {
                // Where priority alone gives the slowest too much.
                let other = 1 - slowest;
                families.push(Family {
                    victim: other,
                    first: Some(slowest),
                    from_whole: true,
                    ..held
                });
            }
            // Others that are confined may go first there: the slowest has the rest of the SMs.
            families.extend(others.map(|i| Family { first: Some(i), ..held }));
        }
        families.extend([held, Family { runs: Victim::Apart, ..held }]);
        families
    }

    /// Ways other than the plain one that are worth measuring again, the best first.
    pub fn again<'a>(&self, configurations: &'a [Configuration]) -> impl Iterator<Item = &'a Way> {
        let slowest = |w: &Configuration| w.slowdowns().fold(0.0, f64::max);
        let near =
            |w: &&Configuration| !w.way.is_plain() && slowest(w) <= SPEED_MARGIN * self.bound;
        let mut near: Vec<&Configuration> = configurations.iter().filter(near).collect();
        near.sort_by(|a, b| b.sum().total_cmp(&a.sum()));
        near.into_iter().map(|w| &w.way)
    }

    fn point(&self, configuration: &Configuration, family: Family) -> Option<Point> {
        let Family { victim, runs, first, .. } = family;
        if configuration.way.first != first {
            return None;
        }
        let mut others = configuration.speeds.clone();
        let speed = others.remove(victim);
        let slowest = others.into_iter().fold(f64::INFINITY, f64::min);
        let point = |others_in| Point { others_in, victim: speed, others: slowest };
        let Some(sms) = &configuration.way.sms else {
            return (runs == Victim::Everywhere).then(|| point(self.gpu));
        };
        let mut parts = sms.clone();
        let victim_in = parts.remove(victim);
        let others_in = parts[0];
        let here = match runs {
            Victim::Everywhere => victim_in == self.gpu,
            Victim::Apart => victim_in + others_in == self.gpu,
        };
        (here && parts.iter().all(|p| *p == others_in)).then(|| point(others_in))
    }

    /// SMs to give the others next, from results with fewer and with more of them, in that order.
    fn others_in(&self, points: &[Point], kind: Victim) -> Option<u32> {
        let must = 1.0 / self.bound;
        let suffers = |p: &Point| p.victim < SPEED_MARGIN * must;
        let harmed = |p: &Point| p.others < must;
        // With fewer SMs for the others the victim speeds up and they slow down: where both are too
        // slow, or neither is, there is no more to learn.
        if points.iter().any(|p| suffers(p) == harmed(p)) {
            return None;
        }
        // SMs left over beside whole groups go with the last group, which makes that partition
        // larger than requested.
        let most = if kind == Victim::Apart { self.gpu - LEAST } else { self.gpu - 2 * GRAIN };
        let on_grid = |sms: f64| (sms.max(0.0) as u32) / GRAIN * GRAIN;
        let enough = points.iter().rfind(|p| !suffers(p)).copied();
        let too_much = points.iter().find(|p| suffers(p)).copied();
        let next = match (enough, too_much) {
            (None, None) => on_grid(f64::from(self.gpu) * 2.0 / 3.0),
            (None, Some(p)) if p.others_in == self.gpu => on_grid(f64::from(self.gpu) * 2.0 / 3.0),
            (None, Some(p)) => p.others_in.saturating_sub(3 * GRAIN).max(LEAST),
            (Some(p), None) => (p.others_in + 3 * GRAIN).min(most / GRAIN * GRAIN),
            (Some(low), Some(high)) => {
                let (from, to) = (f64::from(low.others_in), f64::from(high.others_in));
                let part =
                    (low.victim - SPEED_MARGIN * must) / (low.victim - high.victim).max(1e-9);
                let last = high.others_in.saturating_sub(1).min(most) / GRAIN * GRAIN;
                on_grid(from + part * (to - from))
                    .clamp(low.others_in + GRAIN, last.max(low.others_in + GRAIN))
            }
        };
        let new = points.iter().all(|p| p.others_in != next);
        let between = too_much.is_none_or(|p| next < p.others_in)
            && enough.is_none_or(|p| next > p.others_in);
        (new && between && (LEAST..=most).contains(&next)).then_some(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const H200: Search = Search { gpu: 132, bound: 1.5, tries: 6, priority: false };
    const FIRST: Search = Search { priority: true, ..H200 };

    fn configuration(way: Way, speeds: Vec<f64>) -> Configuration {
        let errors = vec![0.0; speeds.len()];
        Configuration { way, speeds, errors, sum_error: 0.0 }
    }

    /// Every way tried for a set that runs at the speeds of `does`, with the task that has
    /// priority.
    fn tried_with(
        search: Search,
        members: usize,
        does: impl Fn(&[u32], Option<usize>) -> Vec<f64>,
    ) -> Vec<Configuration> {
        let of = |way: Way| {
            let whole = vec![search.gpu; members];
            let speeds = does(way.sms.as_ref().unwrap_or(&whole), way.first);
            configuration(way, speeds)
        };
        let mut configurations = vec![of(Way::default())];
        while let Some(way) = search.next(&configurations) {
            assert!(configurations.len() <= search.tries, "{configurations:?}");
            assert!(configurations.iter().all(|w| w.way != way), "{configurations:?}");
            configurations.push(of(way));
        }
        configurations
    }

    /// The same without priority.
    fn tried(
        search: Search,
        members: usize,
        does: impl Fn(&[u32]) -> Vec<f64>,
    ) -> Vec<Configuration> {
        tried_with(search, members, |parts, _| does(parts))
    }

    fn parts(configurations: &[Configuration]) -> Vec<Vec<u32>> {
        configurations.iter().filter_map(|w| w.way.sms.clone()).collect()
    }

    fn allowed(search: &Search, configuration: &Configuration) -> bool {
        configuration.slowdowns().all(|s| s <= search.bound)
    }

    #[test]
    fn nothing_is_tried_where_no_partition_can_help() {
        assert_eq!(parts(&tried(H200, 2, |_| vec![0.95, 0.93])), [[0; 2]; 0]);
        // Two copies of a task that fills the GPU: to be allowed they would have to get a quarter
        // more done.
        assert_eq!(parts(&tried(H200, 2, |_| vec![0.53, 0.53])), [[0; 2]; 0]);
        assert_eq!(H200.next(&[]), None);
    }

    #[test]
    fn the_other_is_confined_until_no_task_is_too_slow() {
        // The first task uses all it can get; the second is as fast as its rest of the SMs allows
        // alone.
        let does = |p: &[u32]| {
            let (a, b) = (f64::from(p[0]), f64::from(p[1]));
            vec![(a / 120.0).min(1.0), ((b - 0.8 * a.min(b)) / 60.0).min(1.0)]
        };
        let configurations = tried(H200, 2, does);
        assert!(!allowed(&H200, &configurations[0]));
        assert_eq!(parts(&configurations)[0], [88, 132]);
        let good: Vec<&Configuration> =
            configurations.iter().filter(|w| allowed(&H200, w)).collect();
        assert!(!good.is_empty(), "{configurations:?}");
        assert_eq!(
            H200.again(&configurations).next(),
            good.iter().max_by(|a, b| a.sum().total_cmp(&b.sum())).map(|w| &w.way)
        );
    }

    #[test]
    fn of_three_tasks_the_slowest_is_protected() {
        let does = |p: &[u32]| {
            let apart = p[2] < 132;
            vec![0.9, 0.85, if apart { 0.6 } else { 0.5 + f64::from(132 - p[0]) / 200.0 }]
        };
        let configurations = tried(H200, 3, does);
        assert_eq!(parts(&configurations)[0], [88, 88, 132]);
        assert!(allowed(&H200, &configurations[1]), "{configurations:?}");
    }

    #[test]
    fn priority_is_tried_before_partitions() {
        let ways = |configurations: &[Configuration]| {
            let way = |w: &Configuration| (w.way.first, w.way.sms.clone());
            configurations.iter().skip(1).map(way).collect::<Vec<_>>()
        };
        // bert beside vit, as measured: priority is enough.
        let bert = |p: &[u32], first: Option<usize>| match (p, first) {
            ([132, 132], Some(0)) => vec![0.78, 0.69],
            _ => vec![0.61, 0.61],
        };
        let found = tried_with(FIRST, 2, bert);
        assert_eq!(ways(&found)[0], (Some(0), None));
        assert!(allowed(&FIRST, &found[1]), "{found:?}");
        // resnet18 beside gpt2: the other has to be confined as well.
        let resnet = |p: &[u32], first: Option<usize>| match first {
            Some(0) => {
                let held = f64::from(132 - p[1]) / 36.0;
                vec![0.60 + 0.13 * held, 0.77 - 0.09 * held]
            }
            _ => vec![0.53, 0.82],
        };
        let found = tried_with(FIRST, 2, resnet);
        assert_eq!(ways(&found)[..2], [(Some(0), None), (Some(0), Some(vec![132, 88]))]);
        assert!(found.iter().any(|w| allowed(&FIRST, w)), "{found:?}");
        // Priority alone turns the tables: its owner is confined.
        let turned = |p: &[u32], first: Option<usize>| match first {
            Some(0) => vec![0.95 * f64::from(p[0]) / 132.0, 0.6 + f64::from(132 - p[0]) / 300.0],
            _ => vec![0.6, 0.8],
        };
        let found = tried_with(FIRST, 2, turned);
        assert_eq!(ways(&found)[1], (Some(0), Some(vec![88, 132])));
        assert!(found.iter().any(|w| allowed(&FIRST, w)), "{found:?}");
        // Otherwise each of the others in turn, where it is confined; then partitions alone.
        let never = |_: &[u32], first: Option<usize>| match first {
            None => vec![0.6, 0.7, 0.9],
            Some(_) => vec![0.5; 3],
        };
        let all = ways(&tried_with(FIRST, 3, never));
        let held = || Some(vec![132, 88, 88]);
        assert_eq!(
            all[..4],
            [(Some(0), None), (Some(1), held()), (Some(2), held()), (None, held())]
        );
    }

    proptest! {
        /// Fewer SMs for the others speed up the victim and slow them down: if some number is good
        /// for both, it is found, and no partition is tried twice or is impossible.
        #[test]
        fn a_partition_good_for_all_is_found(
            at in 40.0..120.0_f64,
            steep in 0.002..0.02_f64,
            flat in 0.001..0.01_f64,
            lift in 0.0..0.2_f64,
        ) {
            let does = |p: &[u32]| {
                let x = f64::from(p[0]);
                let victim = (0.7 + steep * (at - x)).clamp(0.05, 1.0);
                // With SMs of its own the victim never does well.
                let victim = if p[1] < 132 { victim.min(0.3) } else { victim };
                vec![(0.7 + lift - flat * (at - x)).clamp(0.05, 1.0), victim]
            };
            let search = Search { tries: 12, ..H200 };
            let configurations = tried(search, 2, does);
            let all = parts(&configurations);
            for (i, p) in all.iter().enumerate() {
                prop_assert!(!all[..i].contains(p), "{all:?}");
                let side = |sms: u32| (LEAST..=132).contains(&sms);
                prop_assert!(p.iter().all(|sms| side(*sms)), "{all:?}");
                prop_assert!(p[0].is_multiple_of(GRAIN), "{all:?}");
                prop_assert!((p[1] == 132 && p[0] <= 112) || p[0] + p[1] == 132, "{all:?}");
            }
            let sure = |p: &[u32]| {
                let speeds = does(p);
                speeds[1] >= SPEED_MARGIN / search.bound && speeds[0] >= 1.0 / search.bound
            };
            let free = &configurations[0];
            let looked = !all.is_empty();
            let there = (4..=14).map(|n| [n * GRAIN, 132]).any(|p| sure(&p));
            let victim_is_second = free.speeds[1] < free.speeds[0];
            if looked && there && victim_is_second {
                let found = configurations.iter().any(|w| allowed(&search, w));
                prop_assert!(found, "{configurations:?}");
            }
        }
    }
}
