//! Requests of users: each is checked, becomes facts of a step, and is answered once the round of
//! that step is in the store.

use crate::AgentError;
use crate::api::caller::{Caller, User};
use crate::api::control::{JobView, Reply, Request, Submit};
use crate::api::job_file::check::quoted;
use crate::api::job_file::{self, JobFile};
use crate::daemon::inbox::Quit;
use crate::daemon::store::JobRow;
use crate::daemon::{Daemon, JobRecord, learned, quotas, written};
use crate::machine::Order;
use crate::process;
use roommate_core::event::Event;
use roommate_core::idx::{Idx, JobIdx, ProfileIdx, TeamIdx};
use roommate_core::job::Phase;
use roommate_core::journal::{JobLine, Observer, ProfileLine, TeamLine, Writer};
use std::collections::HashSet;

/// Longest name that is compared with those of jobs, to find what was meant.
const LONGEST_NAME: usize = 256;

/// Policies that start a service and leave it where it is. Others give its devices to jobs that
/// are shorter, or have had less, and its users would wait for its next turn; or they divide GPUs
/// by latencies that were profiled, which are known in simulated worlds only.
const SERVE: &[&str] = &[
    "roommate",
    "gandiva",
    "fifo",
    "fifo-backfill",
    "antman",
    "mps",
    "mps-split",
    "time-slicing",
    "random-colocate",
    "kernel-est",
    "mudi-priority",
];

/// Why a request is refused, and what the user can do about it.
type Refusal = (String, Option<String>);

fn refusal(what: String, hint: &str) -> Refusal {
    (what, Some(hint.into()))
}

impl Daemon {
    /// Answers a request whose verb the caller may use; which jobs it may be about is decided here.
    pub(super) fn answer(
        &mut self,
        request: Request,
        caller: &Caller,
    ) -> Result<Reply, AgentError> {
        let job = match &request {
            Request::Cancel { job } | Request::Suspend { job } | Request::Resume { job } => job,
            Request::Resize { job, .. } => job,
            _ => return self.answer_all(request, caller),
        };
        let job = match self.find_job(job, caller) {
            Ok(job) => job,
            Err((what, hint)) => return Ok(Reply::Error { what, hint }),
        };
        self.by = Some(caller.user.name.clone());
        let done = match request {
            Request::Cancel { .. } => self.cancel(job)?,
            Request::Suspend { .. } => self.hold(job, true)?,
            Request::Resume { .. } => self.hold(job, false)?,
            Request::Resize { batch, share, .. } => self.resize(job, batch, share)?,
            _ => unreachable!("other requests were answered above"),
        };
        // A refused request has made no step.
        self.by = None;
        Ok(match done {
            Ok(what) => Reply::Done { what },
            Err((what, hint)) => Reply::Error { what, hint },
        })
    }

    /// Answers a request that does not change a single job.
    fn answer_all(&mut self, request: Request, caller: &Caller) -> Result<Reply, AgentError> {
        Ok(match request {
            Request::Submit(submit) => self.submit(*submit, caller)?,
            Request::Ps {} => {
                let past = self.past.iter().filter(|j| caller.sees(&j.owner)).cloned();
                let own = |job: &JobIdx| caller.sees(&self.jobs[*job].row.owner);
                let jobs = self.jobs.indices().filter(own).map(|job| self.job_view(job, caller));
                Reply::Jobs(past.chain(jobs).collect())
            }
            Request::Describe { job } => match self.find_past(&job, caller) {
                Some(past) => Reply::Job(Box::new(past.clone())),
                None => match self.find_job(&job, caller) {
                    Ok(job) => Reply::Job(Box::new(self.job_view(job, caller))),
                    Err((what, hint)) => Reply::Error { what, hint },
                },
            },
            Request::Down { stop_jobs } => {
                self.inbox.quit(Quit { stop_jobs });
                Reply::Done { what: "the daemon ends".into() }
            }
            Request::Machine {} => Reply::Machine(Box::new(self.machine_view(caller))),
            Request::Logs { .. }
            | Request::Journal { .. }
            | Request::History { .. }
            | Request::WhatIf(_)
            | Request::Draft(_)
            | Request::TokenCreate(_)
            | Request::TokenList {}
            | Request::TokenRevoke { .. } => {
                let what = "files are not read by the daemon's main thread".into();
                Reply::Error { what, hint: None }
            }
            Request::Cancel { .. }
            | Request::Suspend { .. }
            | Request::Resume { .. }
            | Request::Resize { .. } => unreachable!("answered by the caller"),
        })
    }

    /// The job of this name that ended in an earlier part of the journal.
    fn find_past(&self, name: &str, caller: &Caller) -> Option<&JobView> {
        self.past.iter().find(|j| j.name == name && caller.sees(&j.owner))
    }

    /// The job of this name, among the jobs of this part of the journal. A job that the caller does
    /// not see is one that does not exist, and no hint tells them apart.
    fn find_job(&self, name: &str, caller: &Caller) -> Result<JobIdx, Refusal> {
        let own = |j: &JobRecord| caller.sees(&j.row.owner);
        self.jobs.position(|j| j.name == name && own(j)).ok_or_else(|| {
            if let Some(past) = self.find_past(name, caller) {
                return if past.ended {
                    (format!("job {name:?} has ended already"), None)
                } else {
                    let hint = format!("`roommate describe {name}` says what can be done");
                    (format!("job {name:?} is quarantined"), Some(hint))
                };
            }
            if name.len() > LONGEST_NAME {
                let what = format!("there is no job with a name of {} bytes", name.len());
                return refusal(what, "`roommate ps` lists the jobs");
            }
            let names = self.jobs.iter().filter(|j| own(j)).map(|j| j.name.as_str());
            let near = job_file::nearest(name, names);
            let hint = near.map_or("`roommate ps` lists the jobs".to_string(), |n| {
                format!("did you mean {n:?}?")
            });
            (format!("there is no job {}", quoted(name)), Some(hint))
        })
    }

    /// Accepts a job, which is in the store after the next commit.
    fn submit(&mut self, submit: Submit, caller: &Caller) -> Result<Reply, AgentError> {
        let owner = self.config.mode.owner(caller);
        // Keys of different users are different, whatever they chose.
        let key = format!("{} {}", owner.uid, submit.key);
        if let Some(name) = self.store.submitted_as(&key) {
            return Ok(Reply::Submitted { name });
        }
        if let Err(what) = submit.check() {
            let what = format!("job {}: {what}", quoted(submit.file.name()));
            return Ok(Reply::Error { what, hint: Some(job_file::HINT.into()) });
        }
        if let Err(e) = self.can_run(&submit, &owner).and_then(|()| self.can_serve(&submit.file)) {
            return Ok(e.into());
        }
        let submitted_unix_us = self.machine.os().unix_us();
        let row = JobRow { file: submit.file, env: submit.env, owner, submitted_unix_us };
        if let Some((what, hint)) = self.over_quota(&row) {
            return Ok(Reply::error(what, &hint));
        }
        let name = self.free_name(row.file.name());
        if submit.dry_run {
            return Ok(Reply::Done { what: format!("job {name:?} would be accepted") });
        }
        let now = self.clock.now();
        let mut writer = Writer::new(Vec::new());
        let team = self.team(&row.file, &mut writer);
        let profile = self.profile(&row.file, &mut writer);
        let mut spec = row.file.spec(profile, team, now);
        if spec.knobs.mem_mib == 0 && learned::is_used_by(&self.head.policy) {
            spec.knobs.mem_mib = self.usual_mib(&row.file.kind());
        }
        let idx = self.engine.add_job(spec.clone());
        let owner = Some(row.owner.name.clone());
        let line = JobLine { owner, ..JobLine::new(idx, name.clone(), spec) };
        writer.job(&line);
        self.log.job(&line);
        let (id, row) = self.store.add_job(idx.0, &key, &name, row)?;
        self.store.add_lines(&written(writer)?);
        self.jobs.push(JobRecord::new(id, name.clone(), row));
        self.facts.push(Event::Submitted(idx));
        self.by = Some(caller.user.name.clone());
        self.decide()?;
        Ok(Reply::Submitted { name })
    }

    /// Why another job of this owner does not fit its quota.
    fn over_quota(&self, row: &JobRow) -> Option<(String, String)> {
        let owns = |j: &&JobRecord| j.outcome.is_none() && j.row.owner.uid == row.owner.uid;
        let new = (&row.file, quotas::bytes_of(row));
        self.config.quotas.refusal(new, self.jobs.iter().filter(owns))
    }

    /// The team of a job; a new team is written into the journal.
    fn team(&mut self, file: &JobFile, writer: &mut Writer<Vec<u8>>) -> TeamIdx {
        let name = file.team.clone().unwrap_or_else(|| "default".into());
        self.teams.position(|t| *t == name).unwrap_or_else(|| {
            let idx = self.teams.push(name.clone());
            writer.team(&TeamLine { idx, name });
            idx
        })
    }

    /// The profile of a job; a new profile is written into the journal.
    fn profile(&mut self, file: &JobFile, writer: &mut Writer<Vec<u8>>) -> ProfileIdx {
        let (name, mut profile) = (file.kind(), file.profile());
        let now_s = self.machine.os().unix_us() / 1_000_000;
        self.learned.note_kind(&name, &profile, now_s);
        let named = |(_, known): &(ProfileIdx, &String)| **known == name;
        let known = self.profiles.iter_enumerated().rfind(named);
        if let Some(known) = known.map(|(known, _)| known) {
            let given = self.config.known.as_ref().map_or(0, |k| k.profiles.len());
            let has_jobs = || self.engine.state().specs.iter().any(|s| s.profile == known);
            let is_same = || self.engine.state().profiles[known] == profile;
            // Of one that was learned in an earlier run the job file may say something else now.
            if known.usize() < given || is_same() || has_jobs() {
                return known;
            }
            profile.kind = Some(self.engine.state().kind(known));
        }
        let idx = self.engine.add_profile(profile.clone());
        writer.profile(&ProfileLine { idx, name: name.clone(), profile });
        self.profiles.push(name);
        idx
    }

    /// GPU memory that jobs of a kind were measured to use, which fits on the GPUs; 0 = not known.
    fn usual_mib(&self, kind: &str) -> u32 {
        let most = self.head.cluster.gpu_models.iter().map(|m| m.mem_mib).max().unwrap_or(0);
        self.learned.mem_mib(kind).map_or(0, |mib| mib.min(most))
    }

    /// Whether the job could ever run on this machine.
    fn can_run(&self, submit: &Submit, owner: &User) -> Result<(), AgentError> {
        let file = &submit.file;
        // What another user can read is not known here, and what this one can read is not told.
        if owner.uid == User::this().uid {
            has_program(submit)?;
        }
        let node = &self.head.cluster.groups[0];
        let short = |what: &str, need: f64, has: f64| {
            let what = format!(
                "job {:?} can never run: it needs {need} {what}, this machine has {has}",
                file.name()
            );
            Err(AgentError::refused(what, "ask for less, or use a larger machine"))
        };
        let devices = f64::from(file.devices);
        let (cores, mib) = (f64::from(node.cpu_milli) / 1000.0, f64::from(node.host_mib));
        if file.devices > node.gpus {
            return short("devices", devices, f64::from(node.gpus));
        } else if file.cpus.is_some_and(|c| c * devices > cores) {
            return short("CPU cores", file.cpus.unwrap_or_default() * devices, cores);
        } else if f64::from(file.memory_mib) * devices > mib {
            return short("MiB of memory", f64::from(file.memory_mib) * devices, mib);
        }
        Ok(())
    }

    /// Whether the job, if it is a service, could ever answer requests here.
    fn can_serve(&self, file: &JobFile) -> Result<(), AgentError> {
        let Some(service) = &file.service else { return Ok(()) };
        if !SERVE.contains(&self.head.policy.as_str()) {
            let what = format!(
                "job {:?} is a service: the policy {} would take its devices away from it",
                file.name(),
                self.head.policy
            );
            let hint = format!("policies that leave services alone are {}", SERVE.join(", "));
            return Err(AgentError::refused(what, &hint));
        }
        let alive = self.jobs.iter().filter(|j| j.outcome.is_none());
        let mut others = alive.filter_map(|j| j.row.file.service.as_ref());
        if others.any(|other| other.collides_with(service)) {
            let (name, at) = (file.name(), service.address());
            let what = format!("job {name:?}: another service takes requests at {at}");
            return Err(AgentError::refused(what, "choose another `port`"));
        }
        Ok(())
    }

    fn free_name(&self, wanted: &str) -> String {
        let past = self.past.iter().map(|j| j.name.as_str());
        let taken: HashSet<&str> = past.chain(self.jobs.iter().map(|j| j.name.as_str())).collect();
        let numbered = (2..).map(|n| format!("{wanted}-{n}"));
        let mut names = std::iter::once(wanted.to_string()).chain(numbered);
        names.find(|n| !taken.contains(n.as_str())).expect("there are more names than jobs")
    }

    fn cancel(&mut self, job: JobIdx) -> Result<Result<String, Refusal>, AgentError> {
        let name = self.jobs[job].name.clone();
        if self.engine.state().job(job).phase == Phase::Done {
            return Ok(Err((format!("job {name:?} has ended already"), None)));
        }
        // What a service has served so far still belongs into the journal.
        self.machine.report_served(job);
        self.take_reports()?;
        self.facts.push(Event::Cancelled(job));
        self.decide()?;
        self.orders.push(Order::Cancel(job));
        Ok(Ok(format!("cancelled {name}")))
    }

    /// Suspends a job where it is, or resumes it. It keeps its devices, so that its user can resume
    /// it at once.
    fn hold(&mut self, job: JobIdx, held: bool) -> Result<Result<String, Refusal>, AgentError> {
        if let Err(refused) = self.can_hold(job, held) {
            return Ok(Err(refused));
        }
        self.set_by_user(job, Event::Held { job, held })?;
        let name = &self.jobs[job].name;
        Ok(Ok(format!("{} {name}", if held { "suspended" } else { "resumed" })))
    }

    fn can_hold(&self, job: JobIdx, held: bool) -> Result<(), Refusal> {
        let (name, hot) = (&self.jobs[job].name, self.engine.state().job(job));
        if hot.phase == Phase::Done {
            return Err((format!("job {name:?} has ended already"), None));
        }
        if hot.user.held == held {
            let state = if held { "suspended" } else { "running" };
            return Err((format!("job {name:?} is {state} already"), None));
        }
        if held && !matches!(hot.phase, Phase::Running | Phase::Starting) {
            let hint = "a waiting job makes no progress; `roommate cancel` removes it";
            return Err(refusal(format!("job {name:?} is not running"), hint));
        }
        Ok(())
    }

    /// Sets the batch size and the share that a user chose, from the job's next step on.
    fn resize(
        &mut self,
        job: JobIdx,
        batch: Option<u32>,
        share: Option<f64>,
    ) -> Result<Result<String, Refusal>, AgentError> {
        if let Err(refused) = self.can_resize(job, batch, share) {
            return Ok(Err(refused));
        }
        let share_permille = share.map(permille);
        self.set_by_user(job, Event::Resized { job, batch, share_permille })?;
        Ok(Ok(format!("resized {}", self.jobs[job].name)))
    }

    fn can_resize(
        &self,
        job: JobIdx,
        batch: Option<u32>,
        share: Option<f64>,
    ) -> Result<(), Refusal> {
        let name = &self.jobs[job].name;
        if self.engine.state().job(job).phase == Phase::Done {
            let what = format!("job {name:?} has ended already");
            return Err(refusal(what, "`roommate ps` lists the jobs"));
        }
        if let Some(share) = share.filter(|s| !(0.0..=1.0).contains(s)) {
            let hint = "0 leaves the share to the policy again";
            return Err(refusal(format!("a share is 0 to 1 of a device, not {share}"), hint));
        }
        if let Some((what, hint)) = share.and_then(|s| self.config.quotas.share_refusal(s)) {
            return Err((what, Some(hint)));
        }
        let Some(batch) = batch else { return Ok(()) };
        let known = self.machine.job(job).and_then(|j| j.tenant.as_ref());
        let Some(range) = known.filter(|t| t.peer.is_some()).and_then(|t| t.batches) else {
            let hint = "it has to be running, with `min` and `max` in its call of `roommate.steps`";
            return Err(refusal(format!("job {name:?} cannot change its batch size"), hint));
        };
        if batch != 0 && !(range.min..=range.max).contains(&batch) {
            let what = format!(
                "job {name:?} works with batches of {} to {}, not {batch}",
                range.min, range.max
            );
            return Err(refusal(what, "0 leaves the size to the policy again"));
        }
        Ok(())
    }

    /// Records what a user set, then has the machine apply it.
    fn set_by_user(&mut self, job: JobIdx, fact: Event) -> Result<(), AgentError> {
        self.facts.push(fact);
        self.decide()?;
        let user = self.engine.state().job(job).user;
        self.orders.push(Order::Override(job, user));
        Ok(())
    }
}

/// Whether the folder and the program of a job exist.
fn has_program(submit: &Submit) -> Result<(), AgentError> {
    let file = &submit.file;
    let workdir = file.workdir.clone().unwrap_or_default();
    if !workdir.is_dir() {
        let what = format!(
            "job {:?}: the folder {:?} does not exist",
            file.name(),
            workdir.display().to_string()
        );
        return Err(AgentError::refused(what, "`workdir` is relative to the job file"));
    }
    let path = file.env.get("PATH").or_else(|| submit.env.get("PATH")).map(String::as_str);
    let words = file.command.words();
    if let Err(what) = process::find_program(&words[0], path, &workdir) {
        let what = format!("job {:?}: {what}", file.name());
        return Err(AgentError::refused(what, "give a path, or set PATH under `env`"));
    }
    Ok(())
}

/// A share in permille. A share above 0 never becomes 0, which would mean no share.
pub(super) fn permille(share: f64) -> u16 {
    let rounded = (1000.0 * share).round() as u16;
    if share > 0.0 { rounded.max(1) } else { rounded }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_that_serve_exist() {
        for name in SERVE {
            assert!(roommate_core::policy::find(name).is_ok(), "{name}");
        }
    }

    #[test]
    fn a_small_share_does_not_become_zero() {
        assert_eq!([0.0, 0.0001, 0.25, 1.0].map(permille), [0, 1, 250, 1000]);
    }
}
