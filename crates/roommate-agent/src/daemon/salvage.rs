//! Salvage: a journal with holes, made readable. What a lost line had registered is put in its
//! place from the submission of the job, or by something that stands for it; then all that was
//! read can be folded, and a new part can be begun from it ([`rollover`]).
//!
//! Such a journal says what is known of each job. It does not replay: the decisions in the holes
//! are lost.

use crate::AgentError;
use crate::daemon::learned::Learned;
use crate::daemon::rollover;
use crate::daemon::store::{Kept, Store};
use crate::paths::Paths;
use roommate_core::event::{Action, Event};
use roommate_core::idx::{JobIdx, ProfileIdx, TeamIdx};
use roommate_core::job::Spec;
use roommate_core::journal::{
    self, Head, JobLine, JournalError, Observer, ProfileLine, StepLine, StepView, TeamLine, Writer,
};
use roommate_core::profile::Profile;
use roommate_core::time::Time;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    Head(Head),
    Profile(ProfileLine),
    Team(TeamLine),
    Job(JobLine),
    Step(StepLine),
}

/// What could be read of a journal.
#[derive(Default)]
struct Known {
    head: Option<Head>,
    profiles: BTreeMap<u32, ProfileLine>,
    teams: BTreeMap<u32, TeamLine>,
    jobs: BTreeMap<u32, JobLine>,
    steps: Vec<StepLine>,
}

/// Begins a new part of a journal that cannot be replayed; returns its lines and the time of its
/// beginning.
pub(super) fn begin(
    store: &mut Store,
    paths: &Paths,
    lines: &[u8],
    learned: &Learned,
    why: &str,
) -> Result<(Vec<u8>, Time), AgentError> {
    let filled = fill(lines, &store.jobs(), &paths.store())?;
    store.reject(&filled.unusable);
    rollover::begin(store, paths, &filled.lines, None, learned, why)
}

/// A journal without holes, and the jobs that it could not hold.
struct Filled {
    lines: Vec<u8>,
    /// Indices of jobs whose own line is refused by readers, and why.
    unusable: Vec<(u32, String)>,
}

/// Most lines that readers may refuse; a journal with more is no journal.
const MOST_REFUSED: usize = 100;

/// The journal of these lines without holes: first all that is registered, then all steps.
fn fill(lines: &[u8], kept: &[Kept], path: &Path) -> Result<Filled, AgentError> {
    let mut known = Known::default();
    for line in lines.split(|b| *b == b'\n') {
        match serde_json::from_slice(line) {
            Ok(Line::Head(head)) => known.head = Some(head),
            Ok(Line::Profile(line)) => drop(known.profiles.insert(line.idx.0, line)),
            Ok(Line::Team(line)) => drop(known.teams.insert(line.idx.0, line)),
            Ok(Line::Job(line)) => drop(known.jobs.insert(line.idx.0, line)),
            Ok(Line::Step(line)) => known.steps.push(line),
            Err(_) => {}
        }
    }
    let unrepeatable = |what: &str| {
        let (path, what) = (path.to_owned(), what.to_string());
        AgentError::Unrepeatable { path, what }
    };
    let head = known.head.take().ok_or_else(|| unrepeatable("its journal has no head"))?;
    known.fill_registered();
    for job in kept {
        known.fill_job(job);
    }
    known.fill_numbers();
    let mut unusable = Vec::new();
    for _ in 0..MOST_REFUSED {
        let lines = known.write(&head);
        let refused = match journal::read(&lines[..], &mut Nothing) {
            Ok(()) => return Ok(Filled { lines, unusable }),
            Err(JournalError::Bad { line, what, .. }) => (line, what),
            Err(other) => return Err(unrepeatable(&other.to_string())),
        };
        known.remove(refused, &mut unusable);
    }
    Err(unrepeatable("too many lines of its journal cannot be read"))
}

struct Nothing;
impl Observer for Nothing {}

impl Known {
    fn write(&self, head: &Head) -> Vec<u8> {
        let mut writer = Writer::new(Vec::new());
        writer.head(head);
        self.profiles.values().for_each(|line| writer.profile(line));
        self.teams.values().for_each(|line| writer.team(line));
        self.jobs.values().for_each(|line| writer.job(line));
        for StepLine { at, facts, actions, notes, asked, by } in &self.steps {
            let (at, asked, by) = (*at, *asked, by.as_deref());
            writer.step(&StepView { at, facts, actions, notes, asked, by });
        }
        writer.finish().expect("memory can always be written to")
    }

    /// Removes what readers refuse, by its line in what was written.
    fn remove(&mut self, (line, why): (u64, String), unusable: &mut Vec<(u32, String)>) {
        // The first line is the head.
        let mut at = (line as usize).saturating_sub(2);
        if at < self.profiles.len() {
            let idx = ProfileIdx(at as u32);
            self.profiles.insert(idx.0, lost_profile(idx));
            return;
        }
        at -= self.profiles.len();
        // A team is only a name, so it is never refused.
        at = at.saturating_sub(self.teams.len());
        if at < self.jobs.len() {
            let idx = JobIdx(at as u32);
            self.jobs.insert(idx.0, lost_job(idx));
            unusable.push((idx.0, why));
            return;
        }
        at -= self.jobs.len();
        if at < self.steps.len() {
            self.steps.remove(at);
        }
    }

    /// Profiles and teams that jobs refer to.
    fn fill_registered(&mut self) {
        let profiles = self.jobs.values().map(|j| j.spec.profile.0 + 1);
        let last = self.profiles.keys().map(|idx| idx + 1).chain(profiles).max().unwrap_or(0);
        for idx in (0..last.max(1)).map(ProfileIdx) {
            self.profiles.entry(idx.0).or_insert_with(|| lost_profile(idx));
        }
        let teams = self.jobs.values().map(|j| j.spec.team.0 + 1);
        let last = self.teams.keys().map(|idx| idx + 1).chain(teams).max().unwrap_or(0);
        for idx in (0..last.max(1)).map(TeamIdx) {
            let name = format!("lost-{}", idx.0);
            self.teams.entry(idx.0).or_insert(TeamLine { idx, name });
        }
    }

    /// A job whose line is lost, from its submission.
    fn fill_job(&mut self, kept: &Kept) {
        if self.jobs.contains_key(&kept.idx) {
            return;
        }
        let file = &kept.row.file;
        let name = file.profile.clone().unwrap_or_else(|| kept.name.clone());
        let profile = self.profiles.values().find(|p| p.name == name).map(|p| p.idx);
        let profile = profile.unwrap_or_else(|| {
            let idx = ProfileIdx(self.profiles.len() as u32);
            let line = ProfileLine { idx, name, profile: file.profile() };
            self.profiles.insert(idx.0, line);
            idx
        });
        let name = file.team.clone().unwrap_or_else(|| "default".into());
        let team = self.teams.values().find(|t| t.name == name).map(|t| t.idx);
        let team = team.unwrap_or_else(|| {
            let idx = TeamIdx(self.teams.len() as u32);
            self.teams.insert(idx.0, TeamLine { idx, name });
            idx
        });
        let at = self.steps.last().map_or(Time::ZERO, |s| s.at);
        let spec = file.spec(profile, team, at);
        let owner = Some(kept.row.owner.name.clone());
        let line = JobLine { owner, ..JobLine::new(JobIdx(kept.idx), kept.name.clone(), spec) };
        self.jobs.insert(kept.idx, line);
    }

    /// Jobs of which nothing is known but that there was one.
    fn fill_numbers(&mut self) {
        let facts = self.steps.iter().flat_map(|s| s.facts.iter().filter_map(Event::job));
        let actions = self.steps.iter().flat_map(|s| s.actions.iter().map(Action::job));
        let jobs = facts.chain(actions).map(|job| job.0).chain(self.jobs.keys().copied());
        for idx in (0..jobs.max().map_or(0, |last| last + 1)).map(JobIdx) {
            self.jobs.entry(idx.0).or_insert_with(|| lost_job(idx));
        }
    }
}

fn lost_profile(idx: ProfileIdx) -> ProfileLine {
    ProfileLine { idx, name: format!("lost-{}", idx.0), profile: Profile::of_step(1.0) }
}

fn lost_job(idx: JobIdx) -> JobLine {
    let spec = Spec::training(1, 1.0, ProfileIdx(0));
    JobLine::new(idx, format!("lost-{}", idx.0), spec)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::caller::User;
    use crate::api::job_file::JobFile;
    use crate::daemon::store::JobRow;
    use roommate_core::event::Placement;
    use roommate_core::idx::{GpuIdx, GpuSet};
    use roommate_core::knobs::Knobs;
    use roommate_core::policy::Params;
    use roommate_core::state::Costs;
    use std::sync::Arc;

    fn kept(idx: u32, name: &str) -> Kept {
        let file = JobFile::read("command: x\nteam: red", Path::new("j.yaml")).unwrap();
        let row = Arc::new(JobRow {
            file,
            env: BTreeMap::new(),
            owner: User::this(),
            submitted_unix_us: 5,
        });
        Kept {
            id: idx + 7,
            idx,
            name: name.into(),
            row,
            checkpoint: 0.0,
            outcome: None,
            ended_us: None,
            starts: 0,
            failures: 0,
            carried: None,
            quarantined: None,
        }
    }

    /// A journal of two jobs.
    fn journal() -> Vec<u8> {
        let mut writer = Writer::new(Vec::new());
        let cluster = "1x2".parse().unwrap();
        let fifo = ("fifo", Params::new());
        writer.head(&Head::new(journal::LIVE, fifo, cluster, Costs::default(), 0));
        writer.team(&TeamLine { idx: TeamIdx(0), name: "red".into() });
        for (i, name) in ["a", "b"].iter().enumerate() {
            let (idx, profile) = (ProfileIdx(i as u32), Profile::of_step(1.0));
            writer.profile(&ProfileLine { idx, name: (*name).into(), profile });
            let job = JobIdx(i as u32);
            let spec = Spec::training(1, 10.0, idx);
            writer.job(&JobLine::new(job, (*name).into(), spec));
            let gpus = GpuSet::from_slice(&[GpuIdx(i as u32)]);
            let start = [Action::Start(job, Placement { gpus, knobs: Knobs::WHOLE })];
            let facts = [Event::Submitted(job)];
            let (at, notes) = (Time(i as u64), &[][..]);
            writer.step(&StepView {
                at,
                facts: &facts,
                actions: &start,
                notes,
                asked: true,
                by: None,
            });
        }
        writer.finish().unwrap()
    }

    #[derive(Default)]
    struct Names(Vec<String>, usize);
    impl Observer for Names {
        fn job(&mut self, line: &JobLine) {
            self.0.push(line.name.clone());
        }
        fn step(&mut self, _: &StepView<'_>) {
            self.1 += 1;
        }
    }

    #[test]
    fn whichever_lines_are_lost_all_jobs_are_there() {
        let whole = journal();
        let lines: Vec<&[u8]> = whole.split_inclusive(|b| *b == b'\n').collect();
        let jobs = [kept(0, "a"), kept(1, "b")];
        for lost in 0..1_u32 << (lines.len() - 1) {
            let stays = |i: usize| i == 0 || lost & (1 << (i - 1)) == 0;
            let left: Vec<u8> =
                (0..lines.len()).filter(|i| stays(*i)).flat_map(|i| lines[i].to_vec()).collect();
            let filled = fill(&left, &jobs, Path::new("log")).unwrap();
            let mut names = Names::default();
            journal::read(&filled.lines[..], &mut names).unwrap();
            assert_eq!(names.0, ["a", "b"], "{lost:b}");
            let steps = left.split(|b| *b == b'\n').filter(|l| l.starts_with(b"{\"step\""));
            assert_eq!((names.1, filled.unusable.len()), (steps.count(), 0), "{lost:b}");
        }
        let headless = fill(&lines[1..].concat(), &jobs, Path::new("log"));
        assert!(headless.err().unwrap().to_string().contains("no head"));
    }

    #[test]
    fn lines_that_no_reader_takes_are_left_out() {
        let text = String::from_utf8(journal()).unwrap();
        let jobs = [kept(0, "a"), kept(1, "b")];
        // Numbers that JSON does not have or that no journal takes, in a step, a profile and a job.
        for (from, to, names, unusable) in [
            ("\"step\":{\"at\":1,", "\"step\":{\"at\":null,", ["a", "b"], 0),
            ("\"step_s\":1.0", "\"step_s\":null", ["a", "b"], 0),
            ("\"step_s\":1.0", "\"step_s\":-1.0", ["a", "b"], 0),
            ("\"work\":10.0", "\"work\":-10.0", ["a", "b"], 0),
        ] {
            let bad = text.replace(from, to);
            assert_ne!(bad, text, "{from}");
            assert!(journal::read(bad.as_bytes(), &mut Nothing).is_err());
            let filled = fill(bad.as_bytes(), &jobs, Path::new("log")).unwrap();
            let mut found = Names::default();
            journal::read(&filled.lines[..], &mut found).unwrap();
            assert_eq!(found.0, names, "{to}");
            assert_eq!(filled.unusable.len(), unusable, "{to}");
        }
    }
}
