//! Rounds: turning parts of the time into turns. In every round the rows that are furthest behind what
//! they are due get the GPUs, so that over many rounds each has its part.
//!
//! A row is a job, or two jobs that share GPUs. What a row had of a GPU model is kept in seconds since the
//! last new allocation, beginning with a credit, so that nobody starts at zero.

use crate::idx::{Idx, JobIdx};
use crate::policy::gavel::allocation::ByGpuModel;
use crate::time::Span;
use smallvec::SmallVec;
use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BinaryHeap};

/// The jobs of a row.
pub(crate) type Members = SmallVec<[JobIdx; 2]>;

/// What a row has on one GPU model.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Cell {
    /// Part of the time that it is due.
    share: f64,
    /// Seconds that it had since the last new allocation, with the credit.
    got_s: f64,
    /// Seconds by which it fell short up to then.
    deficit_s: f64,
    /// Whether it can run there.
    runs: bool,
}

impl Cell {
    /// What it is due against its part of what all had; the more, the sooner.
    fn priority(&self, all_s: f64) -> f64 {
        if self.runs && self.share > 0.0 { self.share / (self.got_s / all_s) } else { 0.0 }
    }
}

#[derive(Clone, Debug)]
struct Row {
    members: Members,
    gpus: u32,
    cells: SmallVec<[Cell; 4]>,
    /// Whether it was there when the last allocation was made.
    allocated: bool,
}

/// A row that runs in this round, and the GPU model that it runs on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pick {
    /// Its jobs.
    pub(crate) members: Members,
    /// The GPU model.
    pub(crate) gpu_model: u8,
    /// Whether it has an allocation; a newcomer may have none yet.
    pub(crate) allocated: bool,
    row: u32,
}

/// Who may be picked.
#[derive(Clone, Copy)]
pub(crate) struct Rules<'a> {
    /// The GPU models, in the order in which they are given out.
    pub(crate) order: &'a [u8],
    /// Whether a job can be placed now.
    pub(crate) ready: &'a dyn Fn(JobIdx) -> bool,
    /// Whether rows that are due nothing take what is left.
    pub(crate) idle_to_all: bool,
}

/// A row's place in the line for a GPU model: who is furthest behind comes first, then who was so longest, then
/// who is due most, then who came first.
#[derive(Clone, Copy, Debug)]
struct Place {
    keys: [f64; 3],
    row: Reverse<u32>,
}

impl Ord for Place {
    fn cmp(&self, other: &Self) -> Ordering {
        let [a, b, c] = [0, 1, 2].map(|i| move || self.keys[i].total_cmp(&other.keys[i]));
        a().then_with(b).then_with(c).then_with(|| self.row.cmp(&other.row))
    }
}

impl PartialOrd for Place {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Place {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Place {}

/// What every row is due and has had.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ledger {
    rows: Vec<Row>,
    /// Place of a job's own row, plus one.
    place: Vec<u32>,
    /// Rows of two.
    pairs: BTreeMap<[JobIdx; 2], u32>,
    /// Whether rows of two stay in the books when they are due nothing.
    standing: bool,
    credit_s: f64,
    /// Seconds that all rows had of a GPU model; those that came since the last allocation add no credit, and
    /// those that left are not taken out.
    all_s: ByGpuModel,
    /// Round in which a job was last picked.
    picked: Vec<u32>,
    round: u32,
    line: Vec<Place>,
}

impl Ledger {
    /// An empty ledger for rounds of this length. If rows of two are `standing`, they are entered by
    /// [`Self::enter_pair`] and take what is left as everybody does; otherwise they are only there while
    /// they are due something.
    pub(crate) fn new(round: Span, standing: bool) -> Self {
        Self { credit_s: round.secs() / 2.0, standing, ..Self::default() }
    }

    /// Whether rows of two stay in the books.
    pub(crate) fn is_standing(&self) -> bool {
        self.standing
    }

    /// Enters a job that is due these parts until the next allocation. `runs` says on which GPU models.
    pub(crate) fn enter(&mut self, job: JobIdx, gpus: u16, share: &ByGpuModel, runs: &[bool]) {
        self.place.resize(self.place.len().max(job.usize() + 1), 0);
        self.picked.resize(self.place.len(), 0);
        let members = Members::from_slice(&[job]);
        self.add(members, gpus, share, runs, false);
        self.place[job.usize()] = self.rows.len() as u32;
    }

    /// Enters a standing row of two, without credit.
    pub(crate) fn enter_pair(&mut self, pair: [JobIdx; 2], gpus: u16, runs: &[bool]) {
        self.pairs.insert(pair, self.rows.len() as u32);
        let none = ByGpuModel::from_elem(0.0, runs.len());
        self.add(Members::from_slice(&pair), gpus, &none, runs, false);
        if let Some(row) = self.rows.last_mut() {
            row.cells.iter_mut().for_each(|c| c.got_s = 0.0);
        }
    }

    fn add(
        &mut self,
        members: Members,
        gpus: u16,
        share: &ByGpuModel,
        runs: &[bool],
        allocated: bool,
    ) {
        let cell = |(share, runs): (&f64, &bool)| Cell {
            share: *share,
            got_s: self.credit_s,
            deficit_s: 0.0,
            runs: *runs,
        };
        let cells = share.iter().zip(runs).map(cell).collect();
        if self.all_s.is_empty() {
            self.all_s = ByGpuModel::from_elem(1.0, runs.len());
        }
        self.rows.push(Row { members, gpus: gpus.into(), cells, allocated });
    }

    /// Strikes out all rows with a job that is not `here` any more.
    pub(crate) fn keep(&mut self, here: impl Fn(JobIdx) -> bool) {
        for row in &self.rows {
            if let [job] = row.members[..] {
                self.place[job.usize()] = 0;
            }
        }
        self.rows.retain(|r| r.members.iter().all(|j| here(*j)));
        self.find_places();
    }

    fn find_places(&mut self) {
        self.pairs.clear();
        for (i, row) in self.rows.iter().enumerate() {
            match row.members[..] {
                [job] => self.place[job.usize()] = i as u32 + 1,
                [a, b] => _ = self.pairs.insert([a, b], i as u32),
                _ => {}
            }
        }
    }

    /// Closes the books of the last allocation, after so long: who had less than it was due is owed
    /// the rest.
    pub(crate) fn settle(&mut self, since_s: f64) {
        let standing = self.standing;
        self.rows.retain(|r| standing || r.members.len() == 1);
        self.find_places();
        for cell in self.rows.iter_mut().flat_map(|r| &mut r.cells) {
            cell.deficit_s += cell.share * since_s - (cell.got_s - self.credit_s);
            cell.got_s = self.credit_s;
        }
        let all_s = self.rows.len().max(1) as f64 * self.credit_s;
        self.all_s.iter_mut().for_each(|a| *a = all_s);
        for row in self.rows.iter_mut().filter(|r| r.members.len() > 1) {
            row.allocated = true;
            row.cells.iter_mut().for_each(|c| c.share = 0.0);
        }
    }

    /// Sets what a job is due alone on its GPUs.
    pub(crate) fn allot(&mut self, job: JobIdx, share: &ByGpuModel) {
        let row = &mut self.rows[self.place[job.usize()] as usize - 1];
        row.allocated = true;
        row.cells.iter_mut().zip(share).for_each(|(c, s)| c.share = *s);
    }

    /// Adds two jobs that are due these parts together.
    pub(crate) fn allot_pair(&mut self, pair: [JobIdx; 2], share: &ByGpuModel) {
        if let Some(row) = self.pairs.get(&pair) {
            let cells = &mut self.rows[*row as usize].cells;
            cells.iter_mut().zip(share).for_each(|(c, s)| c.share = *s);
            return;
        }
        let gpus = self.rows[self.place[pair[0].usize()] as usize - 1].gpus as u16;
        let runs: SmallVec<[bool; 4]> = share.iter().map(|s| *s > 0.0).collect();
        self.add(Members::from_slice(&pair), gpus, share, &runs, true);
    }

    /// Books time that a row had on a GPU model.
    pub(crate) fn charge(&mut self, pick: &Pick, time_s: f64) {
        // Rows may have moved up since it was picked.
        let row = match pick.members[..] {
            [job] => (self.place[job.usize()] as usize).checked_sub(1),
            _ if self.rows.get(pick.row as usize).is_some_and(|r| r.members == pick.members) => {
                Some(pick.row as usize)
            }
            _ => self.rows.iter().position(|r| r.members == pick.members),
        };
        if let Some(row) = row {
            self.rows[row].cells[usize::from(pick.gpu_model)].got_s += time_s;
            self.all_s[usize::from(pick.gpu_model)] += time_s;
        }
    }

    /// Chooses who runs: for each GPU model those with the highest priority, as far as the GPUs go. `free` is
    /// what there is of each GPU model, and what is left.
    pub(crate) fn pick(&mut self, rules: &Rules<'_>, free: &mut [u32], picks: &mut Vec<Pick>) {
        self.round += 1;
        for gpu_model in rules.order {
            self.pick_on(*gpu_model, rules, free, picks, true);
            if rules.idle_to_all {
                self.pick_on(*gpu_model, rules, free, picks, false);
            }
        }
    }

    /// The same for one GPU model, among those who are `due` something there, or those who are not.
    fn pick_on(
        &mut self,
        gpu_model: u8,
        rules: &Rules<'_>,
        free: &mut [u32],
        picks: &mut Vec<Pick>,
        due: bool,
    ) {
        let k = usize::from(gpu_model);
        if free[k] == 0 {
            return;
        }
        let mut line = std::mem::take(&mut self.line);
        line.clear();
        for (i, row) in self.rows.iter().enumerate() {
            let cell = row.cells[k];
            let priority = cell.priority(self.all_s[k]);
            if cell.runs && (priority > 0.0) == due && !self.is_picked(row) {
                let keys = [priority, cell.deficit_s, cell.share];
                line.push(Place { keys, row: Reverse(i as u32) });
            }
        }
        // Few of many rows are picked: the rest is not sorted.
        let mut line = BinaryHeap::from(line);
        while let Some(Place { row: Reverse(row_at), .. }) = line.pop() {
            if free[k] == 0 {
                break;
            }
            let row = &self.rows[row_at as usize];
            let ready = row.members.iter().all(|j| (rules.ready)(*j));
            if row.gpus > free[k] || self.is_picked(row) || !ready {
                continue;
            }
            free[k] -= row.gpus;
            for job in &row.members {
                self.picked[job.usize()] = self.round;
            }
            let members = row.members.clone();
            picks.push(Pick { members, gpu_model, allocated: row.allocated, row: row_at });
        }
        self.line = line.into_vec();
    }

    /// Whether a member runs in this round already.
    fn is_picked(&self, row: &Row) -> bool {
        row.members.iter().any(|j| self.picked[j.usize()] == self.round)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_follow_the_parts() {
        // Example J: two jobs, one GPU, three quarters and a quarter of the time.
        let mut ledger = Ledger::new(Span::from_secs(360.0), false);
        for (job, share) in [(0, 0.75), (1, 0.25)] {
            let share = ByGpuModel::from_slice(&[share]);
            ledger.enter(JobIdx(job), 1, &share, &[true]);
        }
        let mut turns = Vec::new();
        for _ in 0..7 {
            let mut picks = Vec::new();
            let rules = Rules { order: &[0], ready: &|_| true, idle_to_all: true };
            ledger.pick(&rules, &mut [1], &mut picks);
            assert_eq!(picks.len(), 1);
            ledger.charge(&picks[0], 360.0);
            turns.push(picks[0].members[0].0);
        }
        assert_eq!(turns, [0, 0, 1, 0, 0, 0, 1]);
    }

    #[test]
    fn over_many_rounds_everybody_has_its_part() {
        let mut ledger = Ledger::new(Span::from_secs(1.0), false);
        let parts = [[0.5, 0.2], [0.3, 0.5], [0.2, 0.3]];
        for (job, share) in parts.iter().enumerate() {
            ledger.enter(JobIdx(job as u32), 1, &ByGpuModel::from_slice(share), &[true; 2]);
        }
        let mut had = [[0.0; 2]; 3];
        for _ in 0..1_000 {
            let mut picks = Vec::new();
            let rules = Rules { order: &[0, 1], ready: &|_| true, idle_to_all: true };
            ledger.pick(&rules, &mut [1, 1], &mut picks);
            for pick in &picks {
                ledger.charge(pick, 1.0);
                had[pick.members[0].usize()][usize::from(pick.gpu_model)] += 1e-3;
            }
        }
        for (had, part) in had.iter().zip(parts) {
            for k in 0..2 {
                assert!((had[k] - part[k]).abs() < 0.06, "{had:?} {part:?}");
            }
        }
    }

    #[test]
    fn nobody_runs_twice_and_what_is_left_goes_to_those_who_are_due_nothing() {
        let mut ledger = Ledger::new(Span::from_secs(1.0), false);
        for (job, share) in [(0, [1.0, 0.0]), (1, [0.0, 0.0])] {
            ledger.enter(JobIdx(job), 1, &ByGpuModel::from_slice(&share), &[true; 2]);
        }
        let mut pick = |idle_to_all| {
            let mut picks = Vec::new();
            let rules = Rules { order: &[0, 1], ready: &|_| true, idle_to_all };
            ledger.pick(&rules, &mut [1, 1], &mut picks);
            picks.iter().map(|p| (p.members[0].0, p.gpu_model)).collect::<Vec<_>>()
        };
        assert_eq!(pick(true), [(0, 0), (1, 1)]);
        assert_eq!(pick(false), [(0, 0)]);
    }

    #[test]
    fn standing_rows_of_two_take_what_is_left() {
        for (standing, expected) in [(true, vec![1, 2]), (false, vec![1, 1])] {
            let mut ledger = Ledger::new(Span::from_secs(360.0), standing);
            for job in 0..3 {
                ledger.enter(JobIdx(job), 1, &ByGpuModel::from_slice(&[0.0]), &[true]);
            }
            if standing {
                ledger.enter_pair([JobIdx(1), JobIdx(2)], 1, &[true]);
            }
            ledger.settle(0.0);
            ledger.allot(JobIdx(0), &ByGpuModel::from_slice(&[1.0]));
            let mut picks = Vec::new();
            let rules = Rules { order: &[0], ready: &|_| true, idle_to_all: true };
            ledger.pick(&rules, &mut [2], &mut picks);
            assert_eq!(picks.iter().map(|p| p.members.len()).collect::<Vec<_>>(), expected);
        }
    }
}
