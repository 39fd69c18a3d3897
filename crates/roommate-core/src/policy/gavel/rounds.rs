//! Rounds: carry out fractions of the time. In every round the rows that are furthest behind their
//! fractions get the GPUs, so that over many rounds each row gets its fraction.
//!
//! A row is a job, or two jobs that share GPUs. The time that a row had on a GPU model is counted
//! in seconds since the last new allocation and begins with a credit, so that no row starts at
//! zero.

use crate::idx::{IdxVec, JobIdx};
use crate::policy::gavel::allocation::ByGpuModel;
use crate::time::Span;
use smallvec::SmallVec;
use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BinaryHeap};

/// The jobs of a row.
pub(crate) type Members = SmallVec<[JobIdx; 2]>;

/// State of a row on one GPU model.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Cell {
    /// Fraction of the time that the row should get.
    share: f64,
    /// Seconds that the row had since the last new allocation, plus the credit.
    got_s: f64,
    /// Seconds that the row was short of its fraction before that.
    deficit_s: f64,
    /// Whether the row can run on the GPU model.
    runs: bool,
}

impl Cell {
    /// The row's fraction ÷ its part of the time that all rows had; larger is more urgent.
    fn priority(&self, all_s: f64) -> f64 {
        if self.runs && self.share > 0.0 { self.share / (self.got_s / all_s) } else { 0.0 }
    }
}

#[derive(Clone, Debug)]
struct Row {
    members: Members,
    gpus: u32,
    cells: SmallVec<[Cell; 4]>,
    /// Whether the last allocation included it.
    allocated: bool,
}

/// A row that runs in this round, and the GPU model that it runs on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pick {
    /// Its jobs.
    pub(crate) members: Members,
    /// The GPU model.
    pub(crate) gpu_model: u8,
    /// Whether it has an allocation; a new job may have none yet.
    pub(crate) allocated: bool,
    row: u32,
}

/// Which rows may be picked.
#[derive(Clone, Copy)]
pub(crate) struct Rules<'a> {
    /// The GPU models, in the order in which they are assigned.
    pub(crate) order: &'a [u8],
    /// Whether a job can be placed now.
    pub(crate) ready: &'a dyn Fn(JobIdx) -> bool,
    /// Whether rows without a fraction get leftover GPUs.
    pub(crate) idle_to_all: bool,
}

/// Priority of a row on a GPU model: the row furthest behind first, then the largest deficit of
/// earlier allocations, then the largest fraction, then the oldest row.
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

/// Time that every row should get and has had.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ledger {
    rows: Vec<Row>,
    /// Index of a job's own row, plus one.
    place: IdxVec<JobIdx, u32>,
    /// Indices of rows of two jobs.
    pairs: BTreeMap<[JobIdx; 2], u32>,
    /// Whether rows of two jobs stay in the ledger without a fraction.
    standing: bool,
    credit_s: f64,
    /// Seconds that all rows had on a GPU model. Rows entered since the last allocation add no
    /// credit, and rows that left are not subtracted.
    all_s: ByGpuModel,
    /// Round in which a job was last picked.
    picked: IdxVec<JobIdx, u32>,
    round: u32,
    line: Vec<Place>,
}

impl Ledger {
    /// An empty ledger for rounds of this length. If rows of two jobs are `standing`, they are
    /// entered by [`Self::enter_pair`] and compete for leftover GPUs like all rows; otherwise they
    /// exist only while they have a fraction.
    pub(crate) fn new(round: Span, standing: bool) -> Self {
        Self { credit_s: round.secs() / 2.0, standing, ..Self::default() }
    }

    /// Whether rows of two jobs stay in the ledger without a fraction.
    pub(crate) fn is_standing(&self) -> bool {
        self.standing
    }

    /// Enters a job with these fractions until the next allocation. `runs` says on which GPU models
    /// it can run.
    pub(crate) fn enter(&mut self, job: JobIdx, gpus: u16, share: &ByGpuModel, runs: &[bool]) {
        self.place.grow_for(job, 0);
        self.picked.grow_for(job, 0);
        let members = Members::from_slice(&[job]);
        self.add(members, gpus, share, runs, false);
        self.place[job] = self.rows.len() as u32;
    }

    /// Enters a standing row of two jobs, without credit.
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

    /// Removes all rows with a job for which `here` is false.
    pub(crate) fn keep(&mut self, here: impl Fn(JobIdx) -> bool) {
        for row in &self.rows {
            if let [job] = row.members[..] {
                self.place[job] = 0;
            }
        }
        self.rows.retain(|r| r.members.iter().all(|j| here(*j)));
        self.index_rows();
    }

    fn index_rows(&mut self) {
        self.pairs.clear();
        for (i, row) in self.rows.iter().enumerate() {
            match row.members[..] {
                [job] => self.place[job] = i as u32 + 1,
                [a, b] => _ = self.pairs.insert([a, b], i as u32),
                _ => {}
            }
        }
    }

    /// Ends the last allocation, which lasted `since_s` seconds: the difference between the
    /// fraction of a row and the time that it had is added to its deficit.
    pub(crate) fn settle(&mut self, since_s: f64) {
        let standing = self.standing;
        self.rows.retain(|r| standing || r.members.len() == 1);
        self.index_rows();
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

    /// Sets the fractions of a job alone on its GPUs.
    pub(crate) fn allot(&mut self, job: JobIdx, share: &ByGpuModel) {
        let row = &mut self.rows[self.place[job] as usize - 1];
        row.allocated = true;
        row.cells.iter_mut().zip(share).for_each(|(c, s)| c.share = *s);
    }

    /// Sets the fractions of two jobs that share GPUs, with a new row if they have none.
    pub(crate) fn allot_pair(&mut self, pair: [JobIdx; 2], share: &ByGpuModel) {
        if let Some(row) = self.pairs.get(&pair) {
            let cells = &mut self.rows[*row as usize].cells;
            cells.iter_mut().zip(share).for_each(|(c, s)| c.share = *s);
            return;
        }
        let gpus = self.rows[self.place[pair[0]] as usize - 1].gpus as u16;
        let runs: SmallVec<[bool; 4]> = share.iter().map(|s| *s > 0.0).collect();
        self.add(Members::from_slice(&pair), gpus, share, &runs, true);
    }

    /// Charges a row for time on a GPU model.
    pub(crate) fn charge(&mut self, pick: &Pick, time_s: f64) {
        // The index of the row may have changed since it was picked.
        let row = match pick.members[..] {
            [job] => (self.place[job] as usize).checked_sub(1),
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

    /// Chooses the rows that run: for each GPU model those with the highest priority, as long as
    /// there are GPUs. `free` are the free GPUs of each model, and is updated.
    pub(crate) fn pick(&mut self, rules: &Rules<'_>, free: &mut [u32], picks: &mut Vec<Pick>) {
        self.round += 1;
        for gpu_model in rules.order {
            self.pick_on(*gpu_model, rules, free, picks, true);
            if rules.idle_to_all {
                self.pick_on(*gpu_model, rules, free, picks, false);
            }
        }
    }

    /// Chooses rows for one GPU model: those with a fraction there if `due`, else those without.
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
        // Few of many rows are picked, so the rest need not be sorted.
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
                self.picked[*job] = self.round;
            }
            let members = row.members.clone();
            picks.push(Pick { members, gpu_model, allocated: row.allocated, row: row_at });
        }
        self.line = line.into_vec();
    }

    /// Whether a member is already picked in this round.
    fn is_picked(&self, row: &Row) -> bool {
        row.members.iter().any(|j| self.picked[*j] == self.round)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_follow_the_fractions() {
        // Example J: two jobs on one GPU, with three quarters and a quarter of the time.
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
    fn over_many_rounds_each_row_gets_its_fraction() {
        let mut ledger = Ledger::new(Span::from_secs(1.0), false);
        let parts = [[0.5, 0.2], [0.3, 0.5], [0.2, 0.3]];
        for (job, share) in parts.iter().enumerate() {
            ledger.enter(JobIdx(job as u32), 1, &ByGpuModel::from_slice(share), &[true; 2]);
        }
        let mut had: IdxVec<JobIdx, [f64; 2]> = vec![[0.0; 2]; 3].into();
        for _ in 0..1_000 {
            let mut picks = Vec::new();
            let rules = Rules { order: &[0, 1], ready: &|_| true, idle_to_all: true };
            ledger.pick(&rules, &mut [1, 1], &mut picks);
            for pick in &picks {
                ledger.charge(pick, 1.0);
                had[pick.members[0]][usize::from(pick.gpu_model)] += 1e-3;
            }
        }
        for (had, part) in had.iter().zip(parts) {
            for k in 0..2 {
                assert!((had[k] - part[k]).abs() < 0.06, "{had:?} {part:?}");
            }
        }
    }

    #[test]
    fn leftover_gpus_go_to_rows_without_a_fraction() {
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
    fn standing_pairs_get_leftover_gpus() {
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
