//! A snapshot of the scheduler: its journal, read into the engine that wrote it and the names of
//! what it decides about.

pub(crate) mod fetch;

pub use fetch::{Scheduler, fetch};

use roommate_core::cluster::NodeGroup;
use roommate_core::engine::Engine;
use roommate_core::event::Event;
use roommate_core::idx::{GpuIdx, JobIdx, NodeIdx, ProfileIdx, TeamIdx};
use roommate_core::journal::forecast::{self, Told};
use roommate_core::journal::replay::Replay;
use roommate_core::journal::{
    CLUSTER, Head, JobLine, JournalError, Observer, ProfileLine, TeamLine, read,
};
use roommate_core::time::Time;
use std::collections::BTreeMap;

/// Why a snapshot cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is not a journal.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// It is a journal, but not of a cluster, or not one that this program decides in the same way.
    #[error("{0}")]
    Other(String),
}

/// A snapshot of the scheduler.
pub struct Snapshot {
    /// The configuration of the scheduler.
    pub head: Head,
    /// The engine after the last step.
    pub engine: Engine,
    /// How late it was, since the journal began.
    pub at: Time,
    /// When the engine wants to be called next.
    pub wake: Option<Time>,
    names: Names,
}

#[derive(Default)]
struct Names {
    head: Option<Head>,
    jobs: Vec<String>,
    profiles: Vec<String>,
    teams: Vec<String>,
    end: Option<Time>,
}

impl Names {
    fn job(&self, job: JobIdx) -> &str {
        self.jobs.get(job.0 as usize).map_or("a pod", String::as_str)
    }
}

impl Observer for Names {
    fn head(&mut self, head: &Head) {
        self.head = Some(head.clone());
    }
    fn profile(&mut self, line: &ProfileLine) {
        self.profiles.push(line.name.clone());
    }
    fn team(&mut self, line: &TeamLine) {
        self.teams.push(line.name.clone());
    }
    fn job(&mut self, line: &JobLine) {
        self.jobs.push(line.name.clone());
    }
    fn end(&mut self, at: Time) {
        self.end = Some(at);
    }
}

impl Snapshot {
    /// Reads a journal, and decides everything in it again.
    pub fn of(journal: &[u8]) -> Result<Self, Error> {
        let mut both = (Replay::default(), Names::default());
        read(journal, &mut both)?;
        let (replay, mut names) = both;
        if let Some(refused) = replay.refused {
            return Err(Error::Other(refused.to_string()));
        }
        if let Some(difference) = replay.difference {
            let step = difference.step;
            return Err(Error::Other(format!(
                "this program decides differently than the scheduler did (step {step}): use the \
                 version of the scheduler"
            )));
        }
        let (Some(head), Some(engine)) = (names.head.take(), replay.engine) else {
            return Err(Error::Other("it has no head".into()));
        };
        if head.world != CLUSTER || head.nodes.is_empty() {
            return Err(Error::Other("it is not a snapshot of a scheduler on Kubernetes".into()));
        }
        let at = names.end.unwrap_or(replay.at);
        Ok(Self { head, engine, at, wake: replay.wake, names })
    }

    /// The same with an engine over the same nodes that has not begun.
    pub(crate) fn with(self, head: Head, engine: Engine) -> Self {
        Self { head, engine, wake: None, ..self }
    }

    /// The name of a job: of its pod or of its gang, with the namespace.
    pub fn job(&self, job: JobIdx) -> &str {
        self.names.job(job)
    }

    /// Tells the engine facts and does what it asks for until it asks for nothing more.
    pub(crate) fn settle(&mut self, facts: Vec<Event>) -> Told {
        let name = |job: JobIdx| self.names.job(job).to_string();
        let told = forecast::settle(&mut self.engine, self.at, facts, &name);
        self.wake = told.wake;
        told
    }

    /// Gives the next job of the engine a name.
    pub(crate) fn name_next(&mut self, name: &str) {
        self.names.jobs.push(name.into());
    }

    /// The profile with this name, if there is one.
    pub fn profile(&self, name: &str) -> Option<ProfileIdx> {
        let at = self.names.profiles.iter().position(|n| n == name)?;
        Some(ProfileIdx(at as u32))
    }

    /// Gives the next profile of the engine a name.
    pub(crate) fn name_next_profile(&mut self, name: &str) {
        self.names.profiles.push(name.into());
    }

    /// The team with this name; a new one if there is none.
    pub(crate) fn team(&mut self, name: &str) -> TeamIdx {
        let at = self.names.teams.iter().position(|n| n == name).unwrap_or_else(|| {
            self.names.teams.push(name.into());
            self.names.teams.len() - 1
        });
        TeamIdx(at as u32)
    }

    /// The name of a node.
    pub fn node(&self, node: NodeIdx) -> &str {
        self.head.nodes.get(node.0 as usize).map_or("?", String::as_str)
    }

    /// The node of a GPU, and the number of the GPU there.
    pub fn place(&self, gpu: GpuIdx) -> (NodeIdx, u16) {
        let state = self.engine.state();
        let node = state.gpu(gpu).node;
        (node, (gpu.0 - state.node(node).first.0) as u16)
    }

    /// The first GPU of each node.
    pub(crate) fn first_gpus(&self) -> BTreeMap<String, u32> {
        let nodes = self.head.nodes.iter().zip(&self.engine.state().nodes);
        nodes.map(|(name, node)| (name.clone(), node.first.0)).collect()
    }

    /// Each node with the group that describes it.
    pub(crate) fn groups(&self) -> impl Iterator<Item = &NodeGroup> {
        let each = |g| {
            std::iter::repeat_n(g, {
                let g: &NodeGroup = g;
                g.count as usize
            })
        };
        self.head.cluster.groups.iter().flat_map(each)
    }
}
