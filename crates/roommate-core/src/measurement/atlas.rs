//! An atlas: the measurements of tasks on one GPU model, and estimates for what was not measured.
//!
//! Between measured batch sizes everything is interpolated over the logarithm of the batch; below
//! the smallest a step takes as long as there, above the largest it grows with the batch. Speeds
//! over SMs are made monotone first (pool adjacent violators): a task that ran faster on fewer SMs
//! is noise. Measured pairs are answered as measured, the others by [`contention`].
//!
//! [`contention`]: crate::measurement::contention

use crate::measurement::contention::{
    self, ByPairKind, Errors, Fit, Footprint, Guest, MECHANISMS, PairKind, Rights, Side, TaskId,
    Validation,
};
use crate::measurement::rows::{Alone, Gpm, Group, Mixed, Rate, Row, Solo, TaskKind, Trainings};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

mod alone;
mod curve;
mod graphs;
mod service;
mod task;

pub use alone::{AloneErrors, check_alone};
pub use graphs::{Graphs, read_graphs};
use service::Service;
use task::Task;

/// A task as it runs on a GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tenant {
    /// Which task.
    pub task: TaskId,
    /// Its batch size.
    pub batch: u32,
    /// SMs that it is confined to; `None` = not confined.
    pub sms: Option<u32>,
    /// Share of time during which it has work; 1 for training.
    pub load: f64,
    /// Whether its kernels start before those of tenants without priority.
    pub priority: bool,
    /// SMs that it is limited to, without a promise; `None` = no limit.
    pub most_sms: Option<u32>,
}

/// The counters that a monitor shows while a task runs alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Counters {
    /// Busy share of the SMs, 0 to 1.
    pub sm_util: f64,
    /// Busy share of the memory bandwidth, 0 to 1.
    pub dram_util: f64,
    /// GPU memory in MiB.
    pub mem_mib: u32,
}

/// A tenant of a measured pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Seat {
    task: TaskId,
    batch: u32,
    sms: Option<u32>,
}

/// Mean of the measurements of one tenant beside another.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Met {
    sum: f64,
    runs: u32,
    /// Load of the other tenant.
    load: f64,
}

/// Loads that differ by no more than this are treated as equal.
const SAME_LOAD: f64 = 0.1;

/// Measurements on one GPU model.
#[derive(Clone, Debug, PartialEq)]
pub struct Atlas {
    /// Number of SMs of the GPU.
    sms: u32,
    tasks: Vec<Task>,
    /// Batch times of the tasks that are services.
    services: BTreeMap<TaskId, Service>,
    /// Slowdown of a service's batches beside a training task, by batch size.
    beside: BTreeMap<(TaskId, TaskId), Vec<(u32, f64)>>,
    names: BTreeMap<(TaskKind, String), TaskId>,
    /// Slowdown per missing share of SMs that a task uses, for tasks without a measured curve.
    sensitivity: f64,
    met: BTreeMap<(Seat, Seat), Met>,
    sides: Vec<Side>,
    fit: Fit,
    noise: Noise,
}

/// Repeatability of the measurements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Noise {
    /// The same task alone in two sessions: relative difference of its speed.
    pub solo_again: Errors,
    /// A task beside a copy of itself: difference between the two normalised speeds.
    pub twins: Errors,
    /// Amount by which measured speeds exceed 1, over all sides: no model within (0, 1] can have a
    /// smaller error.
    pub above_one: Errors,
}

/// The rows contain nothing to build an atlas from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no task was measured alone on the whole GPU")]
pub struct Empty;

impl Atlas {
    /// Builds an atlas from the rows of some sessions (files). Speeds in pairs are divided by the
    /// solo speeds of their own session where it has them. Pairs of tasks without solo rows are
    /// left out. A session that measured services in a closed loop, one batch after the other,
    /// gives batch times of services, alone and beside training, and nothing about training.
    pub fn new(all: &[Vec<Row>]) -> Result<Self, Empty> {
        let closed = |rows: &&Vec<Row>| rows.iter().any(|r| matches!(r, Row::Closed(_)));
        let of_services: Vec<&Vec<Row>> = all.iter().filter(closed).collect();
        let sessions: Vec<&Vec<Row>> = all.iter().filter(|rows| !closed(rows)).collect();
        let solos = || sessions.iter().copied().flatten().filter_map(|r| as_solo(r));
        let sms = solos().map(|s| s.sms).max().ok_or(Empty)?;
        let mut by_name: BTreeMap<(TaskKind, String), Vec<&Solo>> = BTreeMap::new();
        for solo in solos() {
            by_name.entry((solo.kind, solo.name.clone())).or_default().push(solo);
        }
        for rows in by_name.values_mut().filter(|rows| rows.iter().any(|r| r.gpm.is_some())) {
            // Without counters a row says nothing about what a task does to others.
            rows.retain(|r| r.gpm.is_some());
        }
        by_name.retain(|_, rows| rows.iter().any(|r| r.sms == sms));
        let tasks: Vec<Task> = by_name.values().map(|rows| Task::new(rows, sms)).collect();
        let ids = (0..).map(TaskId);
        let services = by_name.iter().zip((0..).map(TaskId));
        let services = services.filter(|(((kind, _), _), _)| *kind == TaskKind::Serve);
        let again = |name: &str| -> Vec<&Solo> {
            let rows = of_services.iter().copied().flatten().filter_map(|r| as_solo(r));
            rows.filter(|r| r.kind == TaskKind::Serve && r.name == name).collect()
        };
        let services = services.map(|(((_, name), rows), id)| {
            let rows: Vec<&Solo> = rows.iter().copied().chain(again(name)).collect();
            (id, Service::new(&rows, sms))
        });
        let services = services.collect();
        let mut atlas = Self {
            sms,
            sensitivity: task::sensitivity(&tasks, sms),
            tasks,
            services,
            beside: BTreeMap::new(),
            names: by_name.into_keys().zip(ids).collect(),
            met: BTreeMap::new(),
            sides: Vec::new(),
            fit: Fit::default(),
            noise: Noise::default(),
        };
        atlas.noise.solo_again = atlas.meet_again(sessions.iter().copied().flatten());
        sessions.iter().for_each(|rows| atlas.add_pairs(rows));
        for rows in of_services {
            atlas.beside.extend(service::beside(rows, |kind, name| atlas.task(kind, name)));
        }
        atlas.fit = Fit::of(&atlas.sides.iter().collect::<Vec<_>>());
        atlas.noise.twins = atlas.twins();
        atlas.noise.above_one = Errors::of(atlas.sides.iter().map(|s| (s.measured - 1.0).max(0.0)));
        Ok(atlas)
    }

    /// Keeps the faster of two solo runs of the same task: a task alone on a GPU is only disturbed
    /// by the CPU, which never speeds it up. Returns by how much the runs differed.
    fn meet_again<'a>(&mut self, rows: impl Iterator<Item = &'a Row>) -> Errors {
        let mut differences = Vec::new();
        for Alone { a, batch, it_s, gpm } in rows.filter_map(as_alone) {
            let Some(task) = self.task(TaskKind::Train, a) else { continue };
            let known = self.tasks[usize::from(task.0)].whole_at_mut(*batch);
            let Some(known) = known else { continue };
            differences.push((it_s / known.it_s).max(known.it_s / it_s) - 1.0);
            if *it_s > known.it_s {
                known.it_s = *it_s;
                known.footprint = footprint(gpm);
            }
        }
        Errors::of(differences)
    }

    fn add_pairs(&mut self, rows: &[Row]) {
        let session = Session::of(rows);
        for row in rows {
            let Some(sides) = self.read_pair(row, &session) else { continue };
            let pair = self.pairs();
            for side in sides {
                let [a, b] = side.tenants;
                let met = self.met.entry((a.seat(), b.seat())).or_default();
                *met = Met { sum: met.sum + side.speed, runs: met.runs + 1, load: b.load };
                if !self.fits(&side) {
                    continue;
                }
                let guests = [self.guest(a), self.guest(b)];
                let tasks = [a.task, b.task];
                self.sides.push(Side {
                    kind: side.kind,
                    pair,
                    tasks,
                    guests,
                    measured: side.speed,
                });
            }
        }
    }

    /// Whether the model is fitted to this side: not to training tasks on partitions, which it has
    /// to predict from the partitions beside services, and not to tasks without counters.
    fn fits(&self, side: &Seen) -> bool {
        let counted = |t: &Tenant| self.tasks[usize::from(t.task.0)].counted();
        let parted =
            side.kind == PairKind::Trainings && side.tenants.iter().any(|t| t.sms.is_some());
        !parted && side.tenants.iter().all(counted)
    }

    /// Differences between the two sides of tasks beside themselves.
    fn twins(&self) -> Errors {
        let same = |s: &[Side]| s[0].pair == s[1].pair && s[0].guests[0] == s[1].guests[0];
        let pairs = self.sides.windows(2).filter(|s| same(s));
        Errors::of(pairs.map(|s| (s[0].measured - s[1].measured).abs()))
    }

    /// The tasks of a pair that were not measured alone.
    fn strangers<'a>(&self, row: &'a Row) -> Vec<&'a str> {
        let tasks = match row {
            Row::Solo(_) | Row::Alone(_) | Row::Closed(_) => return Vec::new(),
            Row::Trainings(r) => vec![(TaskKind::Train, &r.a), (TaskKind::Train, &r.b)],
            Row::Group(r) => r.tasks.iter().map(|t| (TaskKind::Train, t)).collect(),
            Row::Mixed(r) => vec![(TaskKind::Train, &r.a), (TaskKind::Serve, &r.b)],
        };
        let strangers = tasks.into_iter().filter(|(kind, name)| self.task(*kind, name).is_none());
        strangers.map(|(_, name)| name.as_str()).collect()
    }

    /// The two sides of a pair of known tasks; `None` for other rows.
    fn read_pair(&self, row: &Row, session: &Session) -> Option<Vec<Seen>> {
        let alone = |t: &Tenant, name: &str| {
            session.it_s(name, t.batch).unwrap_or_else(|| self.steps_per_s(t.task, t.batch))
        };
        match row {
            Row::Solo(_) | Row::Alone(_) | Row::Closed(_) | Row::Group(_) => None,
            // What priority does is known from other measurements (`contention::Mechanisms`).
            Row::Trainings(Trainings { first: Some(_), .. }) => None,
            Row::Trainings(Trainings {
                a,
                batch_a,
                b,
                batch_b,
                sms_a,
                sms_b,
                first: None,
                ra,
                rb,
            }) => {
                let kind = PairKind::Trainings;
                let one = self.training(a, *batch_a, *sms_a)?;
                let two = self.training(b, *batch_b, *sms_b)?;
                let speeds = (ra.it_s / alone(&one, a), rb.it_s / alone(&two, b));
                Some(vec![
                    Seen { kind, tenants: [one, two], speed: speeds.0 },
                    Seen { kind, tenants: [two, one], speed: speeds.1 },
                ])
            }
            Row::Mixed(Mixed { a, batch_a, b, batch_b, sms_a, sms_b, rate_b, ra }) => {
                let task = self.task(TaskKind::Train, a)?;
                let service = self.task(TaskKind::Serve, b)?;
                let load = (rate_b / self.steps_per_s(service, *batch_b)).min(1.0);
                let tenants = [
                    Tenant { sms: Some(*sms_a), ..Tenant::plain(task, *batch_a) },
                    Tenant { sms: Some(*sms_b), load, ..Tenant::plain(service, *batch_b) },
                ];
                let speed = ra.it_s / alone(&tenants[0], a);
                Some(vec![Seen { kind: PairKind::Mixed, tenants, speed }])
            }
        }
    }

    /// A training task on the whole GPU, or confined to `sms` SMs.
    fn training(&self, name: &str, batch: u32, sms: Option<u32>) -> Option<Tenant> {
        let task = self.task(TaskKind::Train, name)?;
        Some(Tenant { sms, ..Tenant::plain(task, batch) })
    }

    /// The tenants of a group of known tasks with their speeds.
    fn read_group(&self, row: &Row, session: &Session) -> Option<Vec<(Tenant, f64)>> {
        let Row::Group(Group { tasks, batches, sms, first: None, r }) = row else { return None };
        let tenant = |(i, ((name, batch), rate)): (usize, ((&String, &u32), &Rate))| {
            let tenant = self.training(name, *batch, sms.as_ref().map(|sms| sms[i]))?;
            let alone = session.it_s(name, *batch);
            let alone = alone.unwrap_or_else(|| self.steps_per_s(tenant.task, *batch));
            Some((tenant, rate.it_s / alone))
        };
        tasks.iter().zip(batches).zip(r).enumerate().map(tenant).collect()
    }

    /// Number of SMs of the GPU.
    pub fn sms(&self) -> u32 {
        self.sms
    }

    /// The task with this name.
    pub fn task(&self, kind: TaskKind, name: &str) -> Option<TaskId> {
        self.names.get(&(kind, name.to_string())).copied()
    }

    /// All tasks, ascending.
    pub fn tasks(&self) -> impl Iterator<Item = (TaskId, TaskKind, &str)> {
        self.names.iter().map(|((kind, name), id)| (*id, *kind, name.as_str()))
    }

    /// Whether the speed of `a` beside `b` was measured, as they are here.
    pub fn has_met(&self, a: Tenant, b: Tenant) -> bool {
        self.met.contains_key(&(a.seat(), b.seat()))
    }

    /// The batch sizes at which a task was measured, ascending.
    pub fn batches(&self, task: TaskId) -> impl Iterator<Item = u32> {
        self.tasks[usize::from(task.0)].batches()
    }

    /// What a task does to a GPU when it runs alone.
    pub fn footprint(&self, task: TaskId, batch: u32) -> Footprint {
        self.tasks[usize::from(task.0)].footprint(batch)
    }

    /// The counters that a monitor shows while a task runs alone.
    pub fn counters(&self, task: TaskId, batch: u32) -> Counters {
        let Footprint { sm, dram, .. } = self.footprint(task, batch);
        let mem_mib = self.tasks[usize::from(task.0)].mem_mib(batch);
        Counters { sm_util: sm, dram_util: dram, mem_mib: mem_mib.round() as u32 }
    }

    /// GPU memory in MiB by batch size, ascending, for a job whose own batch size `own` counts as
    /// the task's `batch`.
    pub fn memory(&self, task: TaskId, batch: u32, own: u32) -> Vec<(u32, u32)> {
        let times = f64::from(own) / f64::from(batch);
        let point = |batch: u32| {
            let own = (f64::from(batch) * times).round().max(1.0) as u32;
            (own, self.counters(task, batch).mem_mib)
        };
        let mut memory: Vec<(u32, u32)> = self.batches(task).map(point).collect();
        memory.dedup_by_key(|p| p.0);
        memory
    }

    /// Steps per second alone on the whole GPU.
    pub fn steps_per_s(&self, task: TaskId, batch: u32) -> f64 {
        self.tasks[usize::from(task.0)].steps_per_s(batch)
    }

    /// Speed alone on `sms` SMs, relative to the whole GPU.
    pub fn kept(&self, task: TaskId, batch: u32, sms: u32) -> f64 {
        self.tasks[usize::from(task.0)].kept(batch, sms, self.sms, self.sensitivity)
    }

    /// Seconds per batch of a service (per step of training) alone on `sms` SMs, or on the whole
    /// GPU.
    pub fn batch_s(&self, task: TaskId, batch: u32, sms: Option<u32>) -> f64 {
        if let Some(service) = self.services.get(&task) {
            return service.batch_s(batch, sms);
        }
        let kept = sms.map_or(1.0, |sms| self.kept(task, batch, sms));
        1.0 / (self.steps_per_s(task, batch) * kept)
    }

    /// Slowdown of a service's batches by the other tenants; 1 = none. Uses measurements beside
    /// each training task where they exist; those were made on disjoint SMs, so for tenants that
    /// share SMs the model is used where it predicts more.
    pub fn slowdown(&self, tenants: &[Tenant], index: usize) -> f64 {
        let a = self.guest(tenants[index]);
        let shares = tenants.iter().filter_map(|t| t.sms).map(|sms| sms.min(self.sms));
        let confined = shares.map(f64::from).sum::<f64>() / f64::from(self.sms);
        let others = tenants.iter().enumerate().filter(|(i, _)| *i != index);
        let extra = |(_, other): (usize, &Tenant)| {
            let b = self.guest(*other);
            let overlap = contention::overlap(&a, &b, confined);
            let model = self.fit.coefficients.extra(&a, &b, overlap);
            match self.beside.get(&(tenants[index].task, other.task)) {
                Some(measured) => {
                    let extra = b.load * (service::at_batch(measured, tenants[index].batch) - 1.0);
                    let extra = MECHANISMS.weigh(extra, &a.rights, &b.rights);
                    if overlap > 0.0 { extra.max(model) } else { extra }
                }
                None => model,
            }
        };
        1.0 + others.map(extra).sum::<f64>()
    }

    fn guest(&self, tenant: Tenant) -> Guest {
        let Tenant { task, batch, sms, load, priority, most_sms } = tenant;
        let part = |sms: u32| f64::from(sms.min(self.sms)) / f64::from(self.sms);
        Guest {
            footprint: self.footprint(task, batch),
            character: self.fit.character(task),
            kept: tenant.reach().map_or(1.0, |sms| self.kept(task, batch, sms)),
            share: sms.map(part),
            load: load.clamp(0.0, 1.0),
            rights: Rights {
                first: priority,
                most: most_sms.filter(|_| sms.is_none()).map_or(1.0, part),
                serves: self.services.contains_key(&task),
            },
        }
    }

    /// Speed of one of these tenants, relative to alone on the whole GPU at the same batch size:
    /// from measured pairs where they exist, from the model for the rest.
    ///
    /// A pair on its own is answered as measured, even where that is faster than the solo curve,
    /// which has its own noise; among more tenants no tenant is assumed to speed up another.
    pub fn speed(&self, tenants: &[Tenant], index: usize) -> f64 {
        let least = if tenants.len() > 2 { 0.0 } else { f64::NEG_INFINITY };
        self.speed_with(tenants, index, |a, b, kept| {
            let met = self.met.get(&(a.seat(), b.seat()))?;
            // A limit without a promise was not measured in pairs: it changes what is kept alone,
            // and the loss is the one that was measured without it.
            let kept = if a.most_sms.is_some() && a.sms.is_none() { 1.0 } else { kept };
            let same = (met.load - b.load).abs() <= SAME_LOAD;
            let extra = same.then(|| (kept * f64::from(met.runs) / met.sum - 1.0).max(least))?;
            Some(MECHANISMS.weigh(extra, &self.guest(a).rights, &self.guest(b).rights))
        })
    }

    /// Speed from the model alone, ignoring measured pairs.
    pub fn model_speed(&self, tenants: &[Tenant], index: usize) -> f64 {
        self.speed_with(tenants, index, |_, _, _| None)
    }

    fn speed_with(
        &self,
        tenants: &[Tenant],
        index: usize,
        known: impl Fn(Tenant, Tenant, f64) -> Option<f64>,
    ) -> f64 {
        let a = self.guest(tenants[index]);
        let shares = tenants.iter().filter_map(|t| t.sms).map(|sms| sms.min(self.sms));
        let confined = shares.map(f64::from).sum::<f64>() / f64::from(self.sms);
        let others = tenants.iter().enumerate().filter(|(i, _)| *i != index).map(|(_, t)| *t);
        let extras = others.map(|other| {
            known(tenants[index], other, a.kept).unwrap_or_else(|| {
                let b = self.guest(other);
                self.fit.coefficients.extra(&a, &b, contention::overlap(&a, &b, confined))
            })
        });
        contention::settle(a.kept, extras.sum())
    }

    /// Number of measured pairs.
    pub fn pairs(&self) -> usize {
        self.sides.last().map_or(0, |s| s.pair + 1)
    }

    /// The fitted model.
    pub fn fit(&self) -> &Fit {
        &self.fit
    }

    /// Slowdown per missing share of SMs that a task uses, for tasks without a measured curve.
    pub fn sensitivity(&self) -> f64 {
        self.sensitivity
    }

    /// Repeatability of the measurements.
    pub fn noise(&self) -> Noise {
        self.noise
    }

    /// Error of the model on pairs that it was not fitted to.
    pub fn validate(&self) -> Validation {
        contention::validate(&self.sides)
    }

    /// Compares the atlas with measured pairs.
    pub fn check(&self, rows: &[Row]) -> Check {
        let session = Session::of(rows);
        let mut check = Check::default();
        let (mut answers, mut model, mut in_groups) = (Vec::new(), Vec::new(), Vec::new());
        for row in rows {
            let strangers = self.strangers(row);
            check.skipped += usize::from(!strangers.is_empty());
            check.unknown.extend(strangers.into_iter().map(String::from));
            if let Some(group) = self.read_group(row, &session) {
                check.groups += 1;
                let tenants: Vec<Tenant> = group.iter().map(|(tenant, _)| *tenant).collect();
                for (i, (_, speed)) in group.iter().enumerate() {
                    in_groups.push((self.speed(&tenants, i) - speed).abs());
                }
            }
            let Some(sides) = self.read_pair(row, &session) else { continue };
            check.pairs += 1;
            for Seen { kind, tenants, speed } in sides {
                answers.push((kind, (self.speed(&tenants, 0) - speed).abs()));
                model.push((kind, (self.model_speed(&tenants, 0) - speed).abs()));
            }
        }
        check.answers = ByPairKind::of(&answers);
        check.model = ByPairKind::of(&model);
        check.in_groups = Errors::of(in_groups);
        check
    }
}

/// Errors of an atlas on measured pairs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Check {
    /// Number of pairs compared.
    pub pairs: usize,
    /// Number of pairs left out because a task is unknown.
    pub skipped: usize,
    /// The unknown tasks.
    pub unknown: BTreeSet<String>,
    /// Errors of the answers that a simulation gets: measured pairs first.
    pub answers: ByPairKind,
    /// Errors of the model alone, for measured pairs too.
    pub model: ByPairKind,
    /// Number of groups of more than two tasks compared.
    pub groups: usize,
    /// Errors of the answers that a simulation gets for members of such groups.
    pub in_groups: Errors,
}

/// One side of a pair row.
struct Seen {
    kind: PairKind,
    tenants: [Tenant; 2],
    speed: f64,
}

impl Tenant {
    /// A tenant that always has work, without priority or limits.
    pub fn plain(task: TaskId, batch: u32) -> Self {
        Self { task, batch, sms: None, load: 1.0, priority: false, most_sms: None }
    }

    /// SMs that it can use at most; `None` = all.
    pub fn reach(self) -> Option<u32> {
        let both = self.sms.zip(self.most_sms).map(|(own, most)| own.min(most));
        both.or(self.sms).or(self.most_sms)
    }

    fn seat(self) -> Seat {
        Seat { task: self.task, batch: self.batch, sms: self.sms }
    }
}

/// Solo speeds of one session.
struct Session<'a>(BTreeMap<(&'a str, u32), f64>);

impl<'a> Session<'a> {
    fn of(rows: &'a [Row]) -> Self {
        let alone = rows.iter().filter_map(as_alone);
        Self(alone.map(|r| ((r.a.as_str(), r.batch), r.it_s)).collect())
    }

    fn it_s(&self, name: &str, batch: u32) -> Option<f64> {
        self.0.get(&(name, batch)).copied()
    }
}

fn as_solo(row: &Row) -> Option<&Solo> {
    if let Row::Solo(solo) = row { Some(solo) } else { None }
}

fn as_alone(row: &Row) -> Option<&Alone> {
    if let Row::Alone(alone) = row { Some(alone) } else { None }
}

fn footprint(gpm: &Gpm) -> Footprint {
    let share = |percent: f64| (percent / 100.0).clamp(0.0, 1.0);
    Footprint {
        busy: share(gpm.graphics),
        sm: share(gpm.sm_util),
        dram: share(gpm.dram),
        launches: gpm.pcie_rx_mib_s,
    }
}

#[cfg(test)]
pub(crate) mod tests;
