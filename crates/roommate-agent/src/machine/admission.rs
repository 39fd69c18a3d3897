//! Who is on the devices: starts that wait until their devices admit them, and processes that are
//! there without being tenants.

use crate::device::{self, GRAIN, Notice, Roster, SmGroups};
use crate::machine::tenant::{Goal, JobRuntime};
use crate::machine::{Machine, Report, Waiting};
use crate::process::kin::Kin;
use roommate_core::event::Placement;
use roommate_core::idx::{GpuIdx, JobIdx};
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
        let Some(known) = self.jobs.get(&job) else { return false };
        let start = Self::device_start(known, place, known.suspect);
        let now = self.now();
        let admitted = self.device.admit(&start, now);
        if admitted {
            self.waiting.remove(&job);
        } else {
            let (place, attempt) = (place.clone(), number);
            self.waiting.insert(job, Waiting { place, attempt, not_before: now });
        }
        admitted
    }

    /// Tries starts again that wait.
    pub(super) fn launch_waiting(&mut self) {
        let now = self.now();
        let due = self.waiting.iter().filter(|(_, w)| w.not_before <= now);
        for (job, w) in due.map(|(job, w)| (*job, w.clone())).collect::<Vec<_>>() {
            self.waiting.remove(&job);
            self.launch(job, w.place, w.attempt);
        }
    }

    /// A start that waits is not wanted any more.
    pub(super) fn forget_waiting(&mut self, job: JobIdx) {
        if self.waiting.remove(&job).is_some()
            && let Some(known) = self.jobs.get(&job)
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
        for Notice { job, what } in self.device.attend(now, &Guests::new(self)) {
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
