//! Who is on the devices: starts that wait until their devices admit them, and processes that are
//! there without being tenants.

use crate::device::{self, Notice};
use crate::machine::tenant::JobRuntime;
use crate::machine::{Machine, Report, Waiting};
use crate::process::kin::Kin;
use roommate_core::event::Placement;
use roommate_core::idx::JobIdx;
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
            turns: place.knobs.turns,
            mem_mib: known.program.mem_mib,
            has_sdk: known.uses_sdk(),
            apart,
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
        let (control, tenants) = (&self.control, self.jobs.values_mut());
        let kin: Vec<(u32, Kin)> =
            tenants.filter_map(|j| Some((j.program.id, control.kin(j.tenant.as_mut()?)))).collect();
        let owner = |pid: u32| kin.iter().find(|(_, kin)| kin.has(pid)).map(|(number, _)| *number);
        for Notice { job, what } in self.device.attend(now, &owner) {
            let of = |number: u32| {
                let mut all = self.jobs.iter();
                all.find(|(_, j)| j.program.id == number).map(|(job, _)| *job)
            };
            let job = job.and_then(of);
            self.report(Report::Notice { job, what });
        }
    }
}

fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}
