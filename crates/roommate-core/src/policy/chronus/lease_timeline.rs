//! A time-line of leases: which jobs hold GPUs in which of the coming terms of equal length, so that
//! every promise is kept.
//!
//! A job that needs n terms before a date takes the latest free ones, which keeps the front of the line
//! open for others. When that fails everybody is packed anew, the hardest first. A plan found in this
//! way can be improved by an integer program; what the program cannot solve stays as it was.

use crate::idx::JobIdx;
use crate::math::lp::{Answer, Cmp, Lp, Solution, Var};
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};

/// Terms ahead that can be promised.
pub(crate) const HORIZON: u64 = 20_000;

/// A date and what it is worth to finish by it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Due {
    /// The first term that is too late.
    pub(crate) until: u64,
    /// What it is worth.
    pub(crate) value: f64,
}

/// What a job asks of the line.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Task {
    /// The job.
    pub(crate) job: JobIdx,
    /// GPUs that are counted for it.
    pub(crate) gpus: u32,
    /// Terms that it still has to run.
    pub(crate) need: u64,
    /// Its dates, worth most and soonest first; at least one.
    pub(crate) dues: SmallVec<[Due; 1]>,
}

/// A task with the terms that it holds.
#[derive(Clone, Debug, PartialEq)]
struct Held {
    gpus: u32,
    dues: SmallVec<[Due; 1]>,
    /// Which of its dates it is planned for.
    due: usize,
    /// Its terms, ascending; as many as it needs.
    terms: Vec<u64>,
}

impl Held {
    fn need(&self) -> u64 {
        self.terms.len() as u64
    }

    fn last_date(&self) -> u64 {
        self.dues.last().map_or(0, |d| d.until)
    }

    fn value(&self) -> f64 {
        self.dues[self.due].value
    }
}

/// Among plans of equal value: run promised work now, or leave room now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Lean {
    /// As much promised work as possible in the first term.
    Now,
    /// As little as possible.
    Later,
}

/// How much may be spent on a better plan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    /// Most pairs of a task and a term in one program; the tasks with the least slack are in it, the
    /// others keep their terms.
    pub(crate) cells: usize,
    /// Most nodes of the search.
    pub(crate) nodes: u64,
}

/// The line and all who hold terms on it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Line {
    capacity: u32,
    first: u64,
    /// GPUs taken in each term from `first` on; all later ones are free.
    used: VecDeque<u32>,
    tasks: BTreeMap<JobIdx, Held>,
}

impl Line {
    /// The first term that can be planned.
    pub(crate) fn first(&self) -> u64 {
        self.first
    }

    /// Whether nobody holds anything.
    pub(crate) fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Everybody who was promised something, ascending.
    pub(crate) fn jobs(&self) -> impl Iterator<Item = JobIdx> {
        self.tasks.keys().copied()
    }

    /// Those who hold the first term, ascending.
    pub(crate) fn holders(&self) -> impl Iterator<Item = JobIdx> {
        let now = |h: &Held| h.terms.first() == Some(&self.first);
        self.tasks.iter().filter(move |(_, h)| now(h)).map(|(job, _)| *job)
    }

    /// The date for which the job is planned: the first term that is too late.
    pub(crate) fn due(&self, job: JobIdx) -> Option<Due> {
        self.tasks.get(&job).map(|h| h.dues[h.due])
    }

    /// Earlier terms are over; a task that held one needs one less.
    pub(crate) fn advance(&mut self, first: u64) {
        if first <= self.first {
            return;
        }
        let over = (first - self.first).min(self.used.len() as u64) as usize;
        self.used.drain(..over);
        self.first = first;
        for held in self.tasks.values_mut() {
            let over = held.terms.partition_point(|s| *s < first);
            held.terms.drain(..over);
        }
    }

    /// There are so many GPUs from now on. Returns those whose promise cannot be kept with fewer.
    pub(crate) fn resize(&mut self, capacity: u32) -> Vec<JobIdx> {
        self.capacity = capacity;
        if self.used.iter().all(|u| *u <= capacity) || self.repack(None) {
            return Vec::new();
        }
        self.repack_those_that_fit()
    }

    /// Promises a new task its best date if it can be kept with all promises given before.
    pub(crate) fn admit(&mut self, task: &Task) -> bool {
        if task.dues.is_empty() || task.need > HORIZON {
            return false;
        }
        let mut held = Held { gpus: task.gpus, dues: task.dues.clone(), due: 0, terms: Vec::new() };
        for (i, due) in task.dues.iter().enumerate() {
            if let Some(terms) = self.latest(task.gpus, task.need, due.until) {
                held.due = i;
                held.terms = terms;
                self.book(&held, true);
                self.tasks.insert(task.job, held);
                return true;
            }
        }
        // Only the number of terms matters where everybody is packed anew.
        held.terms = vec![self.first; task.need as usize];
        !self.is_hopeless(&held) && self.repack(Some((task.job, held)))
    }

    /// The first term after the end of so much work if it took the earliest free terms.
    pub(crate) fn earliest(&self, gpus: u32, need: u64) -> Option<u64> {
        if gpus > self.capacity || need > HORIZON {
            return None;
        }
        let free = (self.first..).filter(|s| self.fits(*s, gpus));
        free.take(need as usize).last().map_or(Some(self.first), |s| Some(s + 1))
    }

    /// The job needs so many terms from the first on; false, and the job is forgotten, if its promise
    /// cannot be kept.
    pub(crate) fn renew(&mut self, job: JobIdx, need: u64) -> bool {
        let Some(mut held) = self.take_out(job) else { return false };
        if need <= held.need() {
            // Who is faster than planned drops terms from the front.
            held.terms.drain(..(held.need() - need) as usize);
            self.enter(job, held);
            return true;
        }
        if need > HORIZON {
            return false;
        }
        for due in 0..held.dues.len() {
            if let Some(terms) = self.latest(held.gpus, need, held.dues[due].until) {
                self.enter(job, Held { due, terms, ..held });
                return true;
            }
        }
        held.terms = vec![self.first; need as usize];
        !self.is_hopeless(&held) && self.repack(Some((job, held)))
    }

    /// Forgets the job.
    pub(crate) fn remove(&mut self, job: JobIdx) {
        self.take_out(job);
    }

    /// Makes the plan better: by rule, then by a program. False if the program was needed and failed.
    pub(crate) fn improve(&mut self, lean: Lean, effort: Effort) -> bool {
        self.raise_dates();
        match lean {
            Lean::Now => self.pull_forward(),
            Lean::Later => self.push_back(),
        }
        let wanted = self.could_be_better(lean);
        !wanted || self.solve(lean, effort)
    }

    /// What the plan is worth.
    pub(crate) fn value(&self, lean: Lean) -> f64 {
        let values: f64 = self.tasks.values().map(Held::value).sum();
        let now = f64::from(self.used_at(self.first)) / f64::from(self.capacity.max(1));
        values + if lean == Lean::Now { now } else { -now }
    }

    fn used_at(&self, term: u64) -> u32 {
        let at = usize::try_from(term - self.first).ok();
        at.and_then(|i| self.used.get(i)).copied().unwrap_or(0)
    }

    fn fits(&self, term: u64, gpus: u32) -> bool {
        self.used_at(term) + gpus <= self.capacity
    }

    fn book(&mut self, held: &Held, enter: bool) {
        let last = held.terms.last().map_or(0, |s| (s + 1 - self.first) as usize);
        if self.used.len() < last {
            self.used.resize(last, 0);
        }
        for term in &held.terms {
            let used = &mut self.used[(term - self.first) as usize];
            *used = if enter { *used + held.gpus } else { *used - held.gpus };
        }
    }

    fn enter(&mut self, job: JobIdx, held: Held) {
        self.book(&held, true);
        self.tasks.insert(job, held);
    }

    fn take_out(&mut self, job: JobIdx) -> Option<Held> {
        let held = self.tasks.remove(&job)?;
        self.book(&held, false);
        Some(held)
    }

    /// The latest free terms before a date.
    fn latest(&self, gpus: u32, need: u64, until: u64) -> Option<Vec<u64>> {
        let end = until.min(self.first + HORIZON);
        let mut terms: Vec<u64> = Vec::new();
        let mut term = end;
        while (terms.len() as u64) < need {
            let missing = need - terms.len() as u64;
            if term < self.first + missing {
                return None;
            }
            term -= 1;
            if self.fits(term, gpus) {
                terms.push(term);
            }
        }
        terms.reverse();
        Some(terms)
    }

    /// Whether even all terms before its last date are too few for it and those who must be done by then.
    fn is_hopeless(&self, held: &Held) -> bool {
        let date = held.last_date();
        let mut wanted = u64::from(held.gpus) * held.need();
        for other in self.tasks.values().filter(|h| h.last_date() <= date) {
            wanted += u64::from(other.gpus) * other.need();
        }
        wanted > u64::from(self.capacity) * date.saturating_sub(self.first)
    }

    /// Widest first, then least slack: who is hard to fit goes first.
    fn hardest_first(&self) -> Vec<JobIdx> {
        let mut order: Vec<_> = self
            .tasks
            .iter()
            .map(|(job, h)| {
                let room = h.last_date().saturating_sub(self.first);
                (Reverse(h.gpus), room.saturating_sub(h.need()), Reverse(room), *job)
            })
            .collect();
        order.sort_unstable();
        order.into_iter().map(|o| o.3).collect()
    }

    /// Packs everybody anew for their last dates, then as much better as possible; all or nothing.
    fn repack(&mut self, new: Option<(JobIdx, Held)>) -> bool {
        let before = (self.used.clone(), self.tasks.clone());
        self.tasks.extend(new);
        let all_fit = self.pack_all().is_empty();
        if all_fit {
            self.raise_dates();
        } else {
            (self.used, self.tasks) = before;
        }
        all_fit
    }

    fn repack_those_that_fit(&mut self) -> Vec<JobIdx> {
        let lost = self.pack_all();
        for job in &lost {
            self.tasks.remove(job);
        }
        self.raise_dates();
        lost
    }

    /// Books everybody for their last dates on an empty line; returns those who do not fit.
    fn pack_all(&mut self) -> Vec<JobIdx> {
        self.used.clear();
        let mut lost = Vec::new();
        for job in self.hardest_first() {
            let held = &self.tasks[&job];
            let (gpus, need, last) = (held.gpus, held.need(), held.dues.len() - 1);
            let Some(terms) = self.latest(gpus, need, held.dues[last].until) else {
                lost.push(job);
                continue;
            };
            if let Some(mut held) = self.tasks.remove(&job) {
                held.due = last;
                held.terms = terms;
                self.enter(job, held);
            }
        }
        lost
    }

    /// Who is planned for a later date than its best takes a better one where that is free.
    fn raise_dates(&mut self) {
        let late: Vec<JobIdx> =
            self.tasks.iter().filter(|(_, h)| h.due > 0).map(|(job, _)| *job).collect();
        for job in late {
            let Some(mut held) = self.take_out(job) else { continue };
            for due in 0..held.due {
                if let Some(terms) = self.latest(held.gpus, held.need(), held.dues[due].until) {
                    held.due = due;
                    held.terms = terms;
                    break;
                }
            }
            self.enter(job, held);
        }
    }

    /// Moves the first planned term of as many as fit to the first term of all, least slack first.
    fn pull_forward(&mut self) {
        let first = self.first;
        let mut order: Vec<_> = self
            .tasks
            .iter()
            .filter(|(_, h)| h.terms.first().is_some_and(|s| *s > first))
            .map(|(job, h)| {
                let slack = h.dues[h.due].until.saturating_sub(first + h.need());
                (slack, Reverse(h.gpus), *job)
            })
            .collect();
        order.sort_unstable();
        for (_, Reverse(gpus), job) in order {
            if self.fits(first, gpus)
                && let Some(mut held) = self.take_out(job)
            {
                held.terms[0] = first;
                self.enter(job, held);
            }
        }
    }

    /// Moves the first term of all to a later free one wherever the date allows it.
    fn push_back(&mut self) {
        let holders: Vec<JobIdx> = self.holders().collect();
        for job in holders {
            let Some(mut held) = self.take_out(job) else { continue };
            if let Some(terms) = self.latest(held.gpus, held.need(), held.dues[held.due].until) {
                held.terms = terms;
            }
            self.enter(job, held);
        }
    }

    /// Whether a program could still find something.
    fn could_be_better(&self, lean: Lean) -> bool {
        let used = self.used_at(self.first);
        let all: u32 = self.tasks.values().map(|h| h.gpus).sum();
        let dates = self.tasks.values().any(|h| h.due > 0);
        dates
            || match lean {
                Lean::Now => used < all.min(self.capacity),
                Lean::Later => used > 0,
            }
    }

    /// Those for whom a program is made: least slack first, as many as the effort allows.
    fn subset(&self, effort: Effort) -> Vec<JobIdx> {
        let mut order: Vec<_> = self
            .tasks
            .iter()
            .map(|(job, h)| {
                let room = h.last_date().min(self.first + HORIZON).saturating_sub(self.first);
                (room.saturating_sub(h.need()), room, *job)
            })
            .collect();
        order.sort_unstable();
        let mut cells = 0;
        let mut fits = |room: u64| {
            let with = cells + room as usize;
            let fits = with <= effort.cells;
            cells = if fits { with } else { cells };
            fits
        };
        order.into_iter().filter(|(_, room, _)| fits(*room)).map(|o| o.2).collect()
    }

    /// Solves the program for a part of the tasks and takes its plan if it is worth more.
    fn solve(&mut self, lean: Lean, effort: Effort) -> bool {
        let jobs = self.subset(effort);
        if jobs.is_empty() {
            return true;
        }
        let worth = self.value(lean);
        let (before, used) = (self.tasks.clone(), self.used.clone());
        let parts: Vec<(JobIdx, Held)> =
            jobs.iter().filter_map(|j| Some((*j, self.take_out(*j)?))).collect();
        let program = Program::new(self, &parts, lean, effort.nodes);
        let solved = program.answer(parts);
        let planned = match solved {
            Some(planned) => planned.into_iter().all(|(job, held)| {
                let sound = held.terms.iter().all(|s| self.fits(*s, held.gpus))
                    && held.need() == before[&job].need();
                self.enter(job, held);
                sound
            }),
            None => false,
        };
        if !planned || self.value(lean) <= worth + 1e-9 {
            (self.tasks, self.used) = (before, used);
        }
        planned
    }
}

/// The integer program for some tasks on a line that the others have left.
struct Program {
    lp: Lp,
    /// The variables of each task: of its terms from the first on, and of its dates if it has several.
    vars: Vec<(Vec<Var>, Vec<Var>)>,
    first: u64,
}

impl Program {
    fn new(line: &Line, tasks: &[(JobIdx, Held)], lean: Lean, nodes: u64) -> Self {
        let mut lp = Lp::maximize();
        lp.limit_nodes(nodes);
        let sign = if lean == Lean::Now { 1.0 } else { -1.0 };
        let mut vars = Vec::new();
        for (_, task) in tasks {
            let end = task.last_date().min(line.first + HORIZON);
            let share = f64::from(task.gpus) / f64::from(line.capacity.max(1));
            let term = |s| if s == line.first { sign * share } else { 0.0 };
            let terms: Vec<Var> = (line.first..end).map(|s| lp.whole_var(term(s), 0, 1)).collect();
            let need = task.need() as f64;
            lp.row(terms.iter().map(|x| (*x, 1.0)), Cmp::Eq, need);
            let dates: Vec<Var> = match &task.dues[..] {
                [_] => Vec::new(),
                dues => dues.iter().map(|d| lp.whole_var(d.value, 0, 1)).collect(),
            };
            if !dates.is_empty() {
                lp.row(dates.iter().map(|d| (*d, 1.0)), Cmp::Eq, 1.0);
            }
            // Who is planned for a date or an earlier one runs in no term behind it.
            for (i, due) in task.dues.iter().enumerate().take(dates.len().saturating_sub(1)) {
                let from = due.until.clamp(line.first, end) - line.first;
                let behind = terms[from as usize..].iter().map(|x| (*x, 1.0));
                let chosen = dates[..=i].iter().map(|d| (*d, need));
                lp.row(behind.chain(chosen), Cmp::Le, need);
            }
            vars.push((terms, dates));
        }
        let columns = vars.iter().map(|(t, _)| t.len()).max().unwrap_or(0);
        for i in 0..columns {
            let there = tasks.iter().zip(&vars).filter_map(|((_, task), (terms, _))| {
                terms.get(i).map(|x| (*x, f64::from(task.gpus)))
            });
            let free = line.capacity.saturating_sub(line.used_at(line.first + i as u64));
            lp.row(there, Cmp::Le, f64::from(free));
        }
        Self { lp, vars, first: line.first }
    }

    /// The tasks with their new terms and dates.
    fn answer(&self, tasks: Vec<(JobIdx, Held)>) -> Option<Vec<(JobIdx, Held)>> {
        let solution = match self.lp.solve() {
            Answer::Optimal(s) | Answer::Feasible(s) => s,
            Answer::Infeasible | Answer::Unbounded | Answer::GaveUp => return None,
        };
        let chosen = tasks.into_iter().zip(&self.vars).map(|((job, mut held), (terms, dates))| {
            held.terms = chosen(&solution, terms).map(|i| self.first + i as u64).collect();
            held.due = chosen(&solution, dates).next().unwrap_or(0);
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

    const EFFORT: Effort = Effort { cells: 200, nodes: 200 };

    fn line(capacity: u32) -> Line {
        Line { capacity, ..Line::default() }
    }

    fn task(job: u32, gpus: u32, need: u64, dues: &[(u64, f64)]) -> Task {
        let dues = dues.iter().map(|(until, value)| Due { until: *until, value: *value }).collect();
        Task { job: JobIdx(job), gpus, need, dues }
    }

    /// What must hold of every line: nobody has a GPU twice, everybody has what it needs in time.
    fn check(line: &Line, needs: &BTreeMap<JobIdx, u64>) {
        assert!(line.used.iter().all(|u| *u <= line.capacity), "{line:?}");
        let mut used = vec![0; line.used.len()];
        for (job, held) in &line.tasks {
            assert_eq!(held.need(), needs[job], "{line:?}");
            assert!(held.terms.is_sorted_by(|a, b| a < b), "{line:?}");
            assert!(held.terms.first().is_none_or(|s| *s >= line.first), "{line:?}");
            assert!(held.terms.last().is_none_or(|s| *s < held.dues[held.due].until), "{line:?}");
            held.terms.iter().for_each(|s| used[(s - line.first) as usize] += held.gpus);
        }
        assert_eq!(line.used, used, "{line:?}");
    }

    #[test]
    fn the_latest_free_terms_are_taken_and_the_front_is_dropped_first() {
        let mut line = line(1);
        assert!(line.admit(&task(0, 1, 2, &[(3, 10.0)])));
        assert_eq!(line.tasks[&JobIdx(0)].terms, [1, 2]);
        assert!(line.admit(&task(1, 1, 1, &[(2, 10.0)])));
        assert_eq!(line.tasks[&JobIdx(1)].terms, [0]);
        assert!(!line.admit(&task(2, 1, 1, &[(3, 10.0)])));
        assert_eq!(line.earliest(1, 1), Some(4));
        line.advance(1);
        assert!(line.renew(JobIdx(0), 1));
        assert_eq!(line.tasks[&JobIdx(0)].terms, [2]);
        assert_eq!(line.earliest(1, 1), Some(2));
    }

    #[test]
    fn with_fewer_gpus_those_that_fit_stay_and_the_others_are_named() {
        let mut line = line(4);
        assert!(line.admit(&task(0, 2, 2, &[(2, 10.0)])));
        assert!(line.admit(&task(1, 1, 2, &[(2, 10.0)])));
        assert!(line.admit(&task(2, 1, 1, &[(9, 10.0)])));
        assert_eq!(line.resize(2), [JobIdx(1)]);
        check(&line, &[(JobIdx(0), 2), (JobIdx(2), 1)].into());
    }

    #[test]
    fn a_program_gives_up_one_value_for_a_larger_one() {
        // By rule 0 keeps its first date and 1 its second: 10 + 2. The other way round it is 8 + 10.
        let mut line = line(1);
        assert!(line.admit(&task(0, 1, 2, &[(2, 10.0), (4, 8.0)])));
        assert!(line.admit(&task(1, 1, 2, &[(2, 10.0), (4, 2.0)])));
        assert!((line.value(Lean::Now) - 13.0).abs() < 1e-9);
        assert!(line.improve(Lean::Now, EFFORT));
        assert!((line.value(Lean::Now) - 19.0).abs() < 1e-9);
        check(&line, &[(JobIdx(0), 2), (JobIdx(1), 2)].into());
    }

    fn tasks() -> impl Strategy<Value = Vec<(u32, u64, u64, u64)>> {
        prop::collection::vec((1u32..5, 1u64..4, 1u64..9, 0u64..4), 1..12)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        #[test]
        fn promises_hold_whatever_comes_later(
            capacity in 1u32..6, tasks in tasks(), late: bool, smaller in 0u32..6,
        ) {
            let lean = if late { Lean::Later } else { Lean::Now };
            let mut line = line(capacity);
            let mut needs = BTreeMap::new();
            for (i, (gpus, need, until, more)) in tasks.into_iter().enumerate() {
                let dues = [(until, 10.0), (until + more, 8.0)];
                let dues = &dues[..=usize::from(more > 0)];
                let before: Vec<JobIdx> = line.jobs().collect();
                let new = task(i as u32, gpus, need, dues);
                let could = line.earliest(gpus, need);
                if line.admit(&new) {
                    needs.insert(new.job, need);
                } else {
                    prop_assert!(could.is_none_or(|c| c > until), "a free place was not taken");
                }
                prop_assert!(before.iter().all(|j| line.tasks.contains_key(j)));
                check(&line, &needs);
            }
            let mut by_rule = line.clone();
            by_rule.improve(lean, Effort { cells: 0, nodes: 0 });
            check(&by_rule, &needs);
            prop_assert!(by_rule.value(lean) + 1e-9 >= line.value(lean));
            line.improve(lean, EFFORT);
            check(&line, &needs);
            prop_assert!(line.value(lean) + 1e-9 >= by_rule.value(lean));
            let holders: Vec<JobIdx> = line.holders().collect();
            holders.iter().for_each(|j| *needs.get_mut(j).unwrap() -= 1);
            line.advance(line.first() + 1);
            check(&line, &needs);
            for lost in line.resize(smaller) {
                needs.remove(&lost);
            }
            check(&line, &needs);
        }

        #[test]
        fn for_tasks_of_one_gpu_and_one_term_the_rule_is_exact(
            capacity in 1u32..4, dates in prop::collection::vec(1u64..7, 1..20),
        ) {
            let mut line = line(capacity);
            let mut taken: Vec<u64> = Vec::new();
            for (i, until) in dates.into_iter().enumerate() {
                // As many as there are places before every date (Hall).
                let feasible = (until..7).all(|by| {
                    let due = taken.iter().filter(|d| **d <= by).count() as u64;
                    due < u64::from(capacity) * by
                });
                let new = task(i as u32, 1, 1, &[(until, 1.0)]);
                prop_assert_eq!(line.admit(&new), feasible);
                taken.extend(feasible.then_some(until));
            }
        }

        #[test]
        fn a_program_finds_the_best_of_few_tasks(
            tasks in prop::collection::vec((1u32..3, 1u64..3, 1u64..4, 1u64..3), 1..4), late: bool,
        ) {
            let lean = if late { Lean::Later } else { Lean::Now };
            let mut line = line(2);
            for (i, (gpus, need, until, more)) in tasks.into_iter().enumerate() {
                line.admit(&task(i as u32, gpus, need, &[(until, 10.0), (until + more, 7.0)]));
            }
            let best = best(&line, lean);
            prop_assert!(line.improve(lean, EFFORT));
            prop_assert!((line.value(lean) - best).abs() < 1e-6, "{} {best} {line:?}", line.value(lean));
        }
    }

    /// The best worth over all plans, the obvious way.
    fn best(line: &Line, lean: Lean) -> f64 {
        fn go(line: &mut Line, jobs: &[JobIdx], all: &Line, lean: Lean) -> f64 {
            let Some((job, rest)) = jobs.split_first() else { return line.value(lean) };
            let held = &all.tasks[job];
            let mut best = f64::NEG_INFINITY;
            for due in 0..held.dues.len() {
                let room = held.dues[due].until - all.first;
                for mask in (0u64..1 << room).filter(|m| u64::from(m.count_ones()) == held.need()) {
                    let terms: Vec<u64> = (0..room).filter(|s| mask >> s & 1 == 1).collect();
                    if terms.iter().all(|s| line.fits(*s, held.gpus)) {
                        line.enter(*job, Held { due, terms, ..held.clone() });
                        best = best.max(go(line, rest, all, lean));
                        line.take_out(*job);
                    }
                }
            }
            best
        }
        let jobs: Vec<JobIdx> = line.jobs().collect();
        let mut empty = Line { tasks: BTreeMap::new(), used: VecDeque::new(), ..line.clone() };
        go(&mut empty, &jobs, line, lean)
    }
}
