//! Who is on the devices: starts that wait until their devices admit them, and processes that are
//! there without being tenants.

use crate::device::{self, GRAIN, Notice, Roster, SmGroups};
use crate::machine::tenant::{Goal, JobRuntime};
use crate::machine::{Machine, Report, Waiting, memory};
use crate::process::kin::Kin;
use roommate_core::event::Placement;
use roommate_core::idx::{GpuIdx, JobIdx};
use std::collections::BTreeMap;
use std::time::Instant;

impl Machine {
    /// How the process of a job is to be started.
    pub(super) fn device_start<'a>(
        known: &JobRuntime,
        place: &'a Placement,
        apart: bool,
    ) -> device::Start<'a> {
        device::Start {
            job: known.program.id,
            owner_uid: known.program.user.as_ref().map_or_else(own_uid, |u| u.uid),
            gpus: &place.gpus,
            allowed: known.allowed(place.knobs),
            without_mps: apart || place.knobs.turns,
            mem_mib: known.program.mem_mib,
            has_sdk: known.uses_sdk(),
            serves: known.program.service.is_some(),
        }
    }

    /// Whether the devices admit the process of a job now; otherwise its start waits.
    pub(super) fn is_admitted(&mut self, job: JobIdx, place: &Placement, number: u32) -> bool {
        let now = self.now();
        if !self.has_memory(job, place) {
            self.wait(job, place, number, memory::again_at(now), true);
            return false;
        }
        let Some(known) = self.jobs.get(&job) else { return false };
        let start = Self::device_start(known, place, known.suspect);
        let admitted = self.device.admit(&start, now);
        if admitted {
            self.waiting.remove(&job);
        } else {
            self.wait(job, place, number, now, false);
        }
        admitted
    }

    /// A start that cannot be done now waits, and keeps its place in the line.
    pub(super) fn wait(
        &mut self,
        job: JobIdx,
        place: &Placement,
        attempt: u32,
        not_before: Instant,
        for_memory: bool,
    ) {
        let since = self.waiting.get(&job).map_or_else(|| self.now(), |w| w.since);
        let place = place.clone();
        self.waiting.insert(job, Waiting { place, attempt, not_before, since, for_memory });
    }

    /// Tries starts again that wait.
    pub(super) fn launch_waiting(&mut self) {
        let now = self.now();
        let due = self.waiting.iter().filter(|(_, w)| w.not_before <= now);
        let mut due: Vec<_> = due.map(|(job, w)| (*job, w.clone())).collect();
        due.sort_by_key(|(_, w)| w.since);
        for (job, w) in due {
            match self.jobs.get(&job) {
                Some(known) if known.is_suspended() => self.resume(job, w.place, w.attempt),
                Some(_) => self.launch(job, w.place, w.attempt),
                None => drop(self.waiting.remove(&job)),
            }
        }
    }

    /// A start that waits is not wanted any more.
    pub(super) fn forget_waiting(&mut self, job: JobIdx) {
        if self.waiting.remove(&job).is_some()
            && let Some(known) = self.jobs.get(&job).filter(|j| j.tenant.is_none())
        {
            self.device.leave(known.program.id);
        }
    }

    /// When processes on the devices are to be compared with the tenants.
    pub(super) fn attend_due(&self, now: Instant) -> Option<Instant> {
        let every = self.device.attend_every(now)?;
        Some(self.attended.map_or(now, |at| at + every))
    }

    /// Compares processes on the devices with the tenants.
    pub(super) fn attend_devices(&mut self) {
        let now = self.now();
        if self.attend_due(now).is_none_or(|due| now < due) {
            return;
        }
        self.attended = Some(now);
        let guests = Guests::new(self);
        let (held, notices) = (guests.memory(), self.device.attend(now, &guests));
        self.note_memory(&held);
        for Notice { job, what } in notices {
            let of = |number: u32| {
                let mut all = self.jobs.iter();
                all.find(|(_, j)| j.program.id == number).map(|(job, _)| *job)
            };
            let job = job.and_then(of);
            self.report(Report::Notice { job, what });
        }
    }
}

/// Who should be on the devices.
struct Guests<'a> {
    machine: &'a Machine,
    /// The processes of each job, by its number.
    kin: Vec<(u32, Kin)>,
}

impl<'a> Guests<'a> {
    fn new(machine: &'a Machine) -> Self {
        let jobs = machine.jobs.values();
        let kin = jobs
            .filter_map(|j| Some((j.program.id, machine.control.kin(j.tenant.as_ref()?))))
            .collect();
        Self { machine, kin }
    }

    /// What the processes of each job, by its number, hold of the memory of one GPU, in MiB.
    fn memory(&self) -> BTreeMap<u32, u32> {
        let mut most: BTreeMap<u32, u32> = BTreeMap::new();
        for processes in self.machine.device.processes() {
            let mut held: BTreeMap<u32, u32> = BTreeMap::new();
            for (pid, mib) in processes {
                if let Some(job) = self.owner(pid) {
                    let sum = held.entry(job).or_default();
                    *sum = sum.saturating_add(mib);
                }
            }
            for (job, mib) in held {
                let known = most.entry(job).or_default();
                *known = mib.max(*known);
            }
        }
        most
    }
}

impl Roster for Guests<'_> {
    fn owner(&self, pid: u32) -> Option<u32> {
        self.kin.iter().find(|(_, kin)| kin.has(pid)).map(|(number, _)| *number)
    }

    fn given(&self, gpu: GpuIdx) -> f64 {
        let SmGroups { groups, rest } = self.machine.device.sm_groups(gpu);
        let all = f64::from(groups * GRAIN + rest).max(1.0);
        let parts = self.machine.tenants_of(gpu).map(|(job, t)| {
            let number = self.machine.jobs[&job].program.id;
            // A job in a seat has been told to keep to it; any other may use what MPS allows.
            let seat = t.range.filter(|_| t.goal == Goal::Run && t.orders.seat == t.range);
            seat.map_or_else(
                || self.machine.device.sm_part(gpu, number),
                |seat| f64::from(seat.sms) / all,
            )
        });
        // What is busy without any tenant are strays, which are told of by themselves.
        parts.reduce(|a, b| a + b).map_or(1.0, |sum| sum.min(1.0))
    }
}

fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}
