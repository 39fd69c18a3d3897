//! The timeline of leases: which jobs hold GPUs in which of the coming leases, so that every
//! promised deadline is met.
//!
//! A job that needs n leases before a deadline takes the latest free ones, which keeps the near
//! future free for other jobs. When that fails all jobs are packed anew, the hardest to fit first.
//! The resulting plan can be improved by an integer program; where the program fails, the plan
//! stays as it was.

use crate::idx::JobIdx;
use crate::math::lp::{Answer, Cmp, Lp, Solution, Var};
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};

/// Leases ahead that can be promised.
pub(crate) const HORIZON_LEASES: u64 = 20_000;

/// A deadline and the value of meeting it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Deadline {
    /// The first lease that is too late.
    pub(crate) until: u64,
    /// Value of a job that finishes before it.
    pub(crate) value: f64,
}

/// The leases that a job requests.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LeaseRequest {
    /// The job that will hold them.
    pub(crate) job: JobIdx,
    /// GPUs that are counted for the job in each lease.
    pub(crate) gpus: u32,
    /// Number of leases of remaining work.
    pub(crate) need: u64,
    /// Its deadlines, most valuable and earliest first; at least one.
    pub(crate) deadlines: SmallVec<[Deadline; 1]>,
}

/// The leases that a job holds.
#[derive(Clone, Debug, PartialEq)]
struct Reservation {
    gpus: u32,
    deadlines: SmallVec<[Deadline; 1]>,
    /// Which of its deadlines it is planned for.
    due: usize,
    /// Numbers of its leases, ascending; as many as the job needs.
    leases: Vec<u64>,
}

impl Reservation {
    fn need(&self) -> u64 {
        self.leases.len() as u64
    }

    fn last_deadline(&self) -> u64 {
        self.deadlines.last().map_or(0, |d| d.until)
    }

    fn value(&self) -> f64 {
        self.deadlines[self.due].value
    }
}

/// Which of the plans of equal value is taken: promised work now, or idle GPUs now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TieBreak {
    /// As much promised work as possible in the first lease.
    Now,
    /// As little promised work as possible in the first lease.
    Later,
}

/// Limits of the integer program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SearchLimits {
    /// Most pairs of a job and a lease in one program; it contains the jobs with the least slack,
    /// the others keep their leases.
    pub(crate) cells: usize,
    /// Most branch-and-bound nodes.
    pub(crate) nodes: u64,
}

/// The timeline and all jobs that hold leases on it.
#[derive(Clone, Debug, Default)]
pub(crate) struct LeaseTimeline {
    capacity: u32,
    first: u64,
    /// GPUs reserved in each lease from `first` on; all later leases are free.
    used: VecDeque<u32>,
    reservations: BTreeMap<JobIdx, Reservation>,
}

impl LeaseTimeline {
    /// The first lease that can be planned.
    pub(crate) fn first(&self) -> u64 {
        self.first
    }

    /// Whether no job holds a lease.
    pub(crate) fn is_empty(&self) -> bool {
        self.reservations.is_empty()
    }

    /// All jobs with a promised deadline, ascending.
    pub(crate) fn jobs(&self) -> impl Iterator<Item = JobIdx> {
        self.reservations.keys().copied()
    }

    /// Jobs that hold the first lease, ascending.
    pub(crate) fn holders(&self) -> impl Iterator<Item = JobIdx> {
        let now = |h: &Reservation| h.leases.first() == Some(&self.first);
        self.reservations.iter().filter(move |(_, h)| now(h)).map(|(job, _)| *job)
    }

    /// The deadline for which the job is planned.
    pub(crate) fn due(&self, job: JobIdx) -> Option<Deadline> {
        self.reservations.get(&job).map(|h| h.deadlines[h.due])
    }

    /// Drops all leases before this one; a job that held one of them needs one less.
    pub(crate) fn advance(&mut self, first: u64) {
        if first <= self.first {
            return;
        }
        let over = (first - self.first).min(self.used.len() as u64) as usize;
        self.used.drain(..over);
        self.first = first;
        for held in self.reservations.values_mut() {
            let over = held.leases.partition_point(|s| *s < first);
            held.leases.drain(..over);
        }
    }

    /// Sets the number of GPUs from now on; returns the jobs whose deadline can no longer be
    /// promised.
    pub(crate) fn resize(&mut self, capacity: u32) -> Vec<JobIdx> {
        self.capacity = capacity;
        if self.used.iter().all(|u| *u <= capacity) || self.repack(None) {
            return Vec::new();
        }
        self.repack_what_fits()
    }

    /// Promises a new job its best deadline that is compatible with all earlier promises.
    pub(crate) fn admit(&mut self, request: &LeaseRequest) -> bool {
        if request.deadlines.is_empty() || request.need > HORIZON_LEASES {
            return false;
        }
        let mut held = Reservation {
            gpus: request.gpus,
            deadlines: request.deadlines.clone(),
            due: 0,
            leases: Vec::new(),
        };
        for (i, due) in request.deadlines.iter().enumerate() {
            if let Some(leases) = self.latest(request.gpus, request.need, due.until) {
                held.due = i;
                held.leases = leases;
                self.count(&held, true);
                self.reservations.insert(request.job, held);
                return true;
            }
        }
        // `repack` reads only the number of leases.
        held.leases = vec![self.first; request.need as usize];
        !self.exceeds_capacity(&held) && self.repack(Some((request.job, held)))
    }

    /// The lease after the last one of `need` leases if they were the earliest free ones.
    pub(crate) fn earliest(&self, gpus: u32, need: u64) -> Option<u64> {
        if gpus > self.capacity || need > HORIZON_LEASES {
            return None;
        }
        let free = (self.first..).filter(|s| self.fits(*s, gpus));
        free.take(need as usize).last().map_or(Some(self.first), |s| Some(s + 1))
    }

    /// Sets the number of leases that the job still needs; false, and the job is removed, if its
    /// deadline can no longer be promised.
    pub(crate) fn renew(&mut self, job: JobIdx, need: u64) -> bool {
        let Some(mut held) = self.withdraw(job) else { return false };
        if need <= held.need() {
            // A job that is ahead of its plan gives up its earliest leases.
            held.leases.drain(..(held.need() - need) as usize);
            self.reserve(job, held);
            return true;
        }
        if need > HORIZON_LEASES {
            return false;
        }
        for due in 0..held.deadlines.len() {
            if let Some(leases) = self.latest(held.gpus, need, held.deadlines[due].until) {
                self.reserve(job, Reservation { due, leases, ..held });
                return true;
            }
        }
        held.leases = vec![self.first; need as usize];
        !self.exceeds_capacity(&held) && self.repack(Some((job, held)))
    }

    /// Removes the job and its leases.
    pub(crate) fn remove(&mut self, job: JobIdx) {
        self.withdraw(job);
    }

    /// Improves the plan by a heuristic, then by the integer program; false if the program was
    /// needed and failed.
    pub(crate) fn improve(&mut self, tie_break: TieBreak, limits: SearchLimits) -> bool {
        self.upgrade_deadlines();
        match tie_break {
            TieBreak::Now => self.move_earlier(),
            TieBreak::Later => self.move_later(),
        }
        let needed = self.is_improvable(tie_break);
        !needed || self.solve(tie_break, limits)
    }

    /// Sum of the values of all promised deadlines, plus or minus the GPU share of the first lease.
    pub(crate) fn value(&self, tie_break: TieBreak) -> f64 {
        let values: f64 = self.reservations.values().map(Reservation::value).sum();
        let now = f64::from(self.used_at(self.first)) / f64::from(self.capacity.max(1));
        values + if tie_break == TieBreak::Now { now } else { -now }
    }

    fn used_at(&self, lease: u64) -> u32 {
        let at = usize::try_from(lease - self.first).ok();
        at.and_then(|i| self.used.get(i)).copied().unwrap_or(0)
    }

    fn fits(&self, lease: u64, gpus: u32) -> bool {
        self.used_at(lease) + gpus <= self.capacity
    }

    /// Adds the GPUs of all leases to `used`, or subtracts them.
    fn count(&mut self, held: &Reservation, add: bool) {
        let last = held.leases.last().map_or(0, |s| (s + 1 - self.first) as usize);
        if self.used.len() < last {
            self.used.resize(last, 0);
        }
        for lease in &held.leases {
            let used = &mut self.used[(lease - self.first) as usize];
            *used = if add { *used + held.gpus } else { *used - held.gpus };
        }
    }

    fn reserve(&mut self, job: JobIdx, held: Reservation) {
        self.count(&held, true);
        self.reservations.insert(job, held);
    }

    fn withdraw(&mut self, job: JobIdx) -> Option<Reservation> {
        let held = self.reservations.remove(&job)?;
        self.count(&held, false);
        Some(held)
    }

    /// The `need` latest free leases before `until`.
    fn latest(&self, gpus: u32, need: u64, until: u64) -> Option<Vec<u64>> {
        let end = until.min(self.first + HORIZON_LEASES);
        let mut leases: Vec<u64> = Vec::new();
        let mut lease = end;
        while (leases.len() as u64) < need {
            let missing = need - leases.len() as u64;
            if lease < self.first + missing {
                return None;
            }
            lease -= 1;
            if self.fits(lease, gpus) {
                leases.push(lease);
            }
        }
        leases.reverse();
        Some(leases)
    }

    /// Whether the GPUs of all leases before its last deadline are too few for the job and the jobs
    /// that must finish by then.
    fn exceeds_capacity(&self, held: &Reservation) -> bool {
        let deadline = held.last_deadline();
        let mut needed = u64::from(held.gpus) * held.need();
        for other in self.reservations.values().filter(|h| h.last_deadline() <= deadline) {
            needed += u64::from(other.gpus) * other.need();
        }
        needed > u64::from(self.capacity) * deadline.saturating_sub(self.first)
    }

    /// Jobs by how hard they are to fit: widest first, then least slack.
    fn hardest_first(&self) -> Vec<JobIdx> {
        let mut order: Vec<_> = self
            .reservations
            .iter()
            .map(|(job, h)| {
                let room = h.last_deadline().saturating_sub(self.first);
                (Reverse(h.gpus), room.saturating_sub(h.need()), Reverse(room), *job)
            })
            .collect();
        order.sort_unstable();
        order.into_iter().map(|o| o.3).collect()
    }

    /// Packs all jobs anew for their last deadlines, then upgrades deadlines where possible;
    /// restores the old plan and returns false if a job does not fit.
    fn repack(&mut self, new: Option<(JobIdx, Reservation)>) -> bool {
        let before = (self.used.clone(), self.reservations.clone());
        self.reservations.extend(new);
        let all_fit = self.pack_all().is_empty();
        if all_fit {
            self.upgrade_deadlines();
        } else {
            (self.used, self.reservations) = before;
        }
        all_fit
    }

    fn repack_what_fits(&mut self) -> Vec<JobIdx> {
        let lost = self.pack_all();
        for job in &lost {
            self.reservations.remove(job);
        }
        self.upgrade_deadlines();
        lost
    }

    /// Reserves leases before the last deadline of each job on an empty timeline; returns the jobs
    /// that do not fit.
    fn pack_all(&mut self) -> Vec<JobIdx> {
        self.used.clear();
        let mut lost = Vec::new();
        for job in self.hardest_first() {
            let held = &self.reservations[&job];
            let (gpus, need, last) = (held.gpus, held.need(), held.deadlines.len() - 1);
            let Some(leases) = self.latest(gpus, need, held.deadlines[last].until) else {
                lost.push(job);
                continue;
            };
            if let Some(mut held) = self.reservations.remove(&job) {
                held.due = last;
                held.leases = leases;
                self.reserve(job, held);
            }
        }
        lost
    }

    /// Replans jobs for a more valuable deadline where enough leases before it are free.
    fn upgrade_deadlines(&mut self) {
        let late: Vec<JobIdx> =
            self.reservations.iter().filter(|(_, h)| h.due > 0).map(|(job, _)| *job).collect();
        for job in late {
            let Some(mut held) = self.withdraw(job) else { continue };
            for due in 0..held.due {
                if let Some(leases) = self.latest(held.gpus, held.need(), held.deadlines[due].until)
                {
                    held.due = due;
                    held.leases = leases;
                    break;
                }
            }
            self.reserve(job, held);
        }
    }

    /// Moves the earliest lease of as many jobs as fit to the first lease, least slack first.
    fn move_earlier(&mut self) {
        let first = self.first;
        let mut order: Vec<_> = self
            .reservations
            .iter()
            .filter(|(_, h)| h.leases.first().is_some_and(|s| *s > first))
            .map(|(job, h)| {
                let slack = h.deadlines[h.due].until.saturating_sub(first + h.need());
                (slack, Reverse(h.gpus), *job)
            })
            .collect();
        order.sort_unstable();
        for (_, Reverse(gpus), job) in order {
            if self.fits(first, gpus)
                && let Some(mut held) = self.withdraw(job)
            {
                held.leases[0] = first;
                self.reserve(job, held);
            }
        }
    }

    /// Moves reservations of the first lease to later free ones where deadlines allow it.
    fn move_later(&mut self) {
        let holders: Vec<JobIdx> = self.holders().collect();
        for job in holders {
            let Some(mut held) = self.withdraw(job) else { continue };
            if let Some(leases) =
                self.latest(held.gpus, held.need(), held.deadlines[held.due].until)
            {
                held.leases = leases;
            }
            self.reserve(job, held);
        }
    }

    /// Whether the integer program could still find a better plan.
    fn is_improvable(&self, tie_break: TieBreak) -> bool {
        let used = self.used_at(self.first);
        let all: u32 = self.reservations.values().map(|h| h.gpus).sum();
        let upgradable = self.reservations.values().any(|h| h.due > 0);
        upgradable
            || match tie_break {
                TieBreak::Now => used < all.min(self.capacity),
                TieBreak::Later => used > 0,
            }
    }

    /// The jobs in the integer program: least slack first, as many as the limits allow.
    fn subset(&self, limits: SearchLimits) -> Vec<JobIdx> {
        let mut order: Vec<_> = self
            .reservations
            .iter()
            .map(|(job, h)| {
                let room =
                    h.last_deadline().min(self.first + HORIZON_LEASES).saturating_sub(self.first);
                (room.saturating_sub(h.need()), room, *job)
            })
            .collect();
        order.sort_unstable();
        let mut cells = 0;
        let mut fits = |room: u64| {
            let with = cells + room as usize;
            let fits = with <= limits.cells;
            cells = if fits { with } else { cells };
            fits
        };
        order.into_iter().filter(|(_, room, _)| fits(*room)).map(|o| o.2).collect()
    }

    /// Solves the integer program for some of the jobs and takes its plan if its value is larger;
    /// returns whether it was solved.
    fn solve(&mut self, tie_break: TieBreak, limits: SearchLimits) -> bool {
        let jobs = self.subset(limits);
        if jobs.is_empty() {
            return true;
        }
        let value_before = self.value(tie_break);
        let (before, used) = (self.reservations.clone(), self.used.clone());
        let parts: Vec<(JobIdx, Reservation)> =
            jobs.iter().filter_map(|j| Some((*j, self.withdraw(*j)?))).collect();
        let program = Program::new(self, &parts, tie_break, limits.nodes);
        let solved = program.answer(parts);
        let planned = match solved {
            Some(planned) => planned.into_iter().all(|(job, held)| {
                let sound = held.leases.iter().all(|s| self.fits(*s, held.gpus))
                    && held.need() == before[&job].need();
                self.reserve(job, held);
                sound
            }),
            None => false,
        };
        if !planned || self.value(tie_break) <= value_before + 1e-9 {
            (self.reservations, self.used) = (before, used);
        }
        planned
    }
}

/// The integer program for some jobs on the leases that the other jobs leave free.
struct Program {
    lp: Lp,
    /// Variables of each job: its leases from the first on, and its deadlines if it has several.
    vars: Vec<(Vec<Var>, Vec<Var>)>,
    first: u64,
}

impl Program {
    fn new(
        timeline: &LeaseTimeline,
        jobs: &[(JobIdx, Reservation)],
        tie_break: TieBreak,
        nodes: u64,
    ) -> Self {
        let mut lp = Lp::maximize();
        lp.limit_nodes(nodes);
        let sign = if tie_break == TieBreak::Now { 1.0 } else { -1.0 };
        let mut vars = Vec::new();
        for (_, held) in jobs {
            let end = held.last_deadline().min(timeline.first + HORIZON_LEASES);
            let share = f64::from(held.gpus) / f64::from(timeline.capacity.max(1));
            let weight = |s| if s == timeline.first { sign * share } else { 0.0 };
            let leases: Vec<Var> =
                (timeline.first..end).map(|s| lp.whole_var(weight(s), 0, 1)).collect();
            let need = held.need() as f64;
            lp.row(leases.iter().map(|x| (*x, 1.0)), Cmp::Eq, need);
            let deadlines: Vec<Var> = match &held.deadlines[..] {
                [_] => Vec::new(),
                deadlines => deadlines.iter().map(|d| lp.whole_var(d.value, 0, 1)).collect(),
            };
            if !deadlines.is_empty() {
                lp.row(deadlines.iter().map(|d| (*d, 1.0)), Cmp::Eq, 1.0);
            }
            // A job planned for this deadline or an earlier one holds no lease behind it.
            for (i, due) in
                held.deadlines.iter().enumerate().take(deadlines.len().saturating_sub(1))
            {
                let from = due.until.clamp(timeline.first, end) - timeline.first;
                let behind = leases[from as usize..].iter().map(|x| (*x, 1.0));
                let chosen = deadlines[..=i].iter().map(|d| (*d, need));
                lp.row(behind.chain(chosen), Cmp::Le, need);
            }
            vars.push((leases, deadlines));
        }
        let columns = vars.iter().map(|(t, _)| t.len()).max().unwrap_or(0);
        for i in 0..columns {
            let there = jobs.iter().zip(&vars).filter_map(|((_, held), (leases, _))| {
                leases.get(i).map(|x| (*x, f64::from(held.gpus)))
            });
            let free =
                timeline.capacity.saturating_sub(timeline.used_at(timeline.first + i as u64));
            lp.row(there, Cmp::Le, f64::from(free));
        }
        Self { lp, vars, first: timeline.first }
    }

    /// The jobs with their new leases and deadlines.
    fn answer(&self, jobs: Vec<(JobIdx, Reservation)>) -> Option<Vec<(JobIdx, Reservation)>> {
        let solution = match self.lp.solve() {
            Answer::Optimal(s) | Answer::Feasible(s) => s,
            Answer::Infeasible | Answer::Unbounded | Answer::GaveUp => return None,
        };
        let chosen =
            jobs.into_iter().zip(&self.vars).map(|((job, mut held), (leases, deadlines))| {
                held.leases = chosen(&solution, leases).map(|i| self.first + i as u64).collect();
                held.due = chosen(&solution, deadlines).next().unwrap_or(0);
                (job, held)
            });
        Some(chosen.collect())
    }
}

fn chosen<'a>(solution: &'a Solution, vars: &'a [Var]) -> impl Iterator<Item = usize> + 'a {
    vars.iter().enumerate().filter(|(_, v)| solution.value(**v) > 0.5).map(|(i, _)| i)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMITS: SearchLimits = SearchLimits { cells: 200, nodes: 200 };

    fn timeline(capacity: u32) -> LeaseTimeline {
        LeaseTimeline { capacity, ..LeaseTimeline::default() }
    }

    fn request(job: u32, gpus: u32, need: u64, deadlines: &[(u64, f64)]) -> LeaseRequest {
        let deadlines = deadlines
            .iter()
            .map(|(until, value)| Deadline { until: *until, value: *value })
            .collect();
        LeaseRequest { job: JobIdx(job), gpus, need, deadlines }
    }

    /// Invariants: no GPU is reserved twice, and every job has enough leases before its deadline.
    fn check(timeline: &LeaseTimeline, needs: &BTreeMap<JobIdx, u64>) {
        assert!(timeline.used.iter().all(|u| *u <= timeline.capacity), "{timeline:?}");
        let mut used = vec![0; timeline.used.len()];
        for (job, held) in &timeline.reservations {
            assert_eq!(held.need(), needs[job], "{timeline:?}");
            assert!(held.leases.is_sorted_by(|a, b| a < b), "{timeline:?}");
            assert!(held.leases.first().is_none_or(|s| *s >= timeline.first), "{timeline:?}");
            assert!(
                held.leases.last().is_none_or(|s| *s < held.deadlines[held.due].until),
                "{timeline:?}"
            );
            held.leases.iter().for_each(|s| used[(s - timeline.first) as usize] += held.gpus);
        }
        assert_eq!(timeline.used, used, "{timeline:?}");
    }

    #[test]
    fn the_latest_free_leases_are_taken() {
        let mut timeline = timeline(1);
        assert!(timeline.admit(&request(0, 1, 2, &[(3, 10.0)])));
        assert_eq!(timeline.reservations[&JobIdx(0)].leases, [1, 2]);
        assert!(timeline.admit(&request(1, 1, 1, &[(2, 10.0)])));
        assert_eq!(timeline.reservations[&JobIdx(1)].leases, [0]);
        assert!(!timeline.admit(&request(2, 1, 1, &[(3, 10.0)])));
        assert_eq!(timeline.earliest(1, 1), Some(4));
        timeline.advance(1);
        assert!(timeline.renew(JobIdx(0), 1));
        assert_eq!(timeline.reservations[&JobIdx(0)].leases, [2]);
        assert_eq!(timeline.earliest(1, 1), Some(2));
    }

    #[test]
    fn with_fewer_gpus_jobs_that_do_not_fit_are_returned() {
        let mut timeline = timeline(4);
        assert!(timeline.admit(&request(0, 2, 2, &[(2, 10.0)])));
        assert!(timeline.admit(&request(1, 1, 2, &[(2, 10.0)])));
        assert!(timeline.admit(&request(2, 1, 1, &[(9, 10.0)])));
        assert_eq!(timeline.resize(2), [JobIdx(1)]);
        check(&timeline, &[(JobIdx(0), 2), (JobIdx(2), 1)].into());
    }

    #[test]
    fn the_program_trades_a_value_for_a_larger_one() {
        // The heuristic gives job 0 its first deadline and job 1 its second: 10 + 2. The other way
        // round it is 8 + 10.
        let mut timeline = timeline(1);
        assert!(timeline.admit(&request(0, 1, 2, &[(2, 10.0), (4, 8.0)])));
        assert!(timeline.admit(&request(1, 1, 2, &[(2, 10.0), (4, 2.0)])));
        assert!((timeline.value(TieBreak::Now) - 13.0).abs() < 1e-9);
        assert!(timeline.improve(TieBreak::Now, LIMITS));
        assert!((timeline.value(TieBreak::Now) - 19.0).abs() < 1e-9);
        check(&timeline, &[(JobIdx(0), 2), (JobIdx(1), 2)].into());
    }

    fn requests() -> impl Strategy<Value = Vec<(u32, u64, u64, u64)>> {
        prop::collection::vec((1u32..5, 1u64..4, 1u64..9, 0u64..4), 1..12)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        #[test]
        fn promises_are_kept_when_more_jobs_arrive(
            capacity in 1u32..6, requests in requests(), late: bool, smaller in 0u32..6,
        ) {
            let tie_break = if late { TieBreak::Later } else { TieBreak::Now };
            let mut timeline = timeline(capacity);
            let mut needs = BTreeMap::new();
            for (i, (gpus, need, until, more)) in requests.into_iter().enumerate() {
                let deadlines = [(until, 10.0), (until + more, 8.0)];
                let deadlines = &deadlines[..=usize::from(more > 0)];
                let before: Vec<JobIdx> = timeline.jobs().collect();
                let new = request(i as u32, gpus, need, deadlines);
                let could = timeline.earliest(gpus, need);
                if timeline.admit(&new) {
                    needs.insert(new.job, need);
                } else {
                    prop_assert!(could.is_none_or(|c| c > until), "free leases were not taken");
                }
                prop_assert!(before.iter().all(|j| timeline.reservations.contains_key(j)));
                check(&timeline, &needs);
            }
            let mut heuristic = timeline.clone();
            heuristic.improve(tie_break, SearchLimits { cells: 0, nodes: 0 });
            check(&heuristic, &needs);
            prop_assert!(heuristic.value(tie_break) + 1e-9 >= timeline.value(tie_break));
            timeline.improve(tie_break, LIMITS);
            check(&timeline, &needs);
            prop_assert!(timeline.value(tie_break) + 1e-9 >= heuristic.value(tie_break));
            let holders: Vec<JobIdx> = timeline.holders().collect();
            holders.iter().for_each(|j| *needs.get_mut(j).unwrap() -= 1);
            timeline.advance(timeline.first() + 1);
            check(&timeline, &needs);
            for lost in timeline.resize(smaller) {
                needs.remove(&lost);
            }
            check(&timeline, &needs);
        }

        #[test]
        fn for_jobs_of_one_gpu_and_one_lease_admission_is_exact(
            capacity in 1u32..4, deadlines in prop::collection::vec(1u64..7, 1..20),
        ) {
            let mut timeline = timeline(capacity);
            let mut taken: Vec<u64> = Vec::new();
            for (i, until) in deadlines.into_iter().enumerate() {
                // Feasible if before every deadline there are as many leases as jobs due (Hall).
                let feasible = (until..7).all(|by| {
                    let due = taken.iter().filter(|d| **d <= by).count() as u64;
                    due < u64::from(capacity) * by
                });
                let new = request(i as u32, 1, 1, &[(until, 1.0)]);
                prop_assert_eq!(timeline.admit(&new), feasible);
                taken.extend(feasible.then_some(until));
            }
        }

        #[test]
        fn the_program_finds_the_best_plan_of_few_jobs(
            requests in prop::collection::vec((1u32..3, 1u64..3, 1u64..4, 1u64..3), 1..4),
            late: bool,
        ) {
            let tie_break = if late { TieBreak::Later } else { TieBreak::Now };
            let mut timeline = timeline(2);
            for (i, (gpus, need, until, more)) in requests.into_iter().enumerate() {
                let deadlines = [(until, 10.0), (until + more, 7.0)];
                timeline.admit(&request(i as u32, gpus, need, &deadlines));
            }
            let best = best(&timeline, tie_break);
            prop_assert!(timeline.improve(tie_break, LIMITS));
            let value = timeline.value(tie_break);
            prop_assert!((value - best).abs() < 1e-6, "{value} {best} {timeline:?}");
        }
    }

    /// The largest value over all plans, by enumeration.
    fn best(timeline: &LeaseTimeline, tie_break: TieBreak) -> f64 {
        fn go(
            timeline: &mut LeaseTimeline,
            jobs: &[JobIdx],
            all: &LeaseTimeline,
            tie_break: TieBreak,
        ) -> f64 {
            let Some((job, rest)) = jobs.split_first() else { return timeline.value(tie_break) };
            let held = &all.reservations[job];
            let mut best = f64::NEG_INFINITY;
            for due in 0..held.deadlines.len() {
                let room = held.deadlines[due].until - all.first;
                for mask in (0u64..1 << room).filter(|m| u64::from(m.count_ones()) == held.need()) {
                    let leases: Vec<u64> = (0..room).filter(|s| mask >> s & 1 == 1).collect();
                    if leases.iter().all(|s| timeline.fits(*s, held.gpus)) {
                        timeline.reserve(*job, Reservation { due, leases, ..held.clone() });
                        best = best.max(go(timeline, rest, all, tie_break));
                        timeline.withdraw(*job);
                    }
                }
            }
            best
        }
        let jobs: Vec<JobIdx> = timeline.jobs().collect();
        let mut empty = LeaseTimeline {
            reservations: BTreeMap::new(),
            used: VecDeque::new(),
            ..timeline.clone()
        };
        go(&mut empty, &jobs, timeline, tie_break)
    }
}
