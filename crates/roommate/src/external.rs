//! A policy in another process, in any language, behind the trait of the built-in ones.
//!
//! ```text
//!  schedule(plan) ──→ asked: the state      ──→ policy (roommate.lab in Python)
//!                 ←── find, place, tune, ... ←──
//!                 ──→ the answer to each     ──→
//!                 ←── decided                ←──
//! ```
//!
//! JSON lines over a Unix socket on which the policy listens (docs/reference/policy-protocol.md).
//! Every edit goes through the plan, which checks it as it checks those of any policy; a refused
//! edit leaves the plan as it was. A policy that fails, or breaks the protocol, decides nothing
//! more: the run is given up, and [`Failure`] says why.

use crate::console;
use anyhow::Context;
use roommate_core::idx::{GpuIdx, Idx, JobIdx, NodeIdx};
use roommate_core::job::Spec;
use roommate_core::knobs::Knobs;
use roommate_core::placement::{self, Rule};
use roommate_core::plan::Plan;
use roommate_core::policy::Policy;
use roommate_core::state::Infeasible;
use roommate_core::time::Time;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Read as _, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// The name of such a policy in results and journals; `replay` knows no policy of this name.
pub(crate) const EXTERNAL: &str = "external";

/// Version of the protocol.
const VERSION: u32 = 1;

/// Longest message of a policy in bytes.
const LONGEST_LINE: u64 = 1 << 20;

/// Why the policy failed, if it did; shared with whoever runs it.
#[derive(Clone, Default)]
pub(crate) struct Failure(Arc<Mutex<Option<anyhow::Error>>>);

impl Failure {
    /// Takes the reason.
    pub(crate) fn take(&self) -> Option<anyhow::Error> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn set(&self, error: anyhow::Error) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }
}

/// What jobs are called, by index: the core knows only the indices.
pub(crate) struct Names {
    /// Of jobs, in the order of their submission.
    pub(crate) jobs: Vec<String>,
    /// Of profiles.
    pub(crate) profiles: Vec<String>,
}

/// The policy's end of the trait.
pub(crate) struct External {
    from: BufReader<UnixStream>,
    to: UnixStream,
    names: Names,
    /// Jobs that the policy was told of.
    told: usize,
    begun: bool,
    broken: bool,
    failure: Failure,
}

/// A message to the policy.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Told<'a> {
    /// The cluster; the first message.
    Begin { version: u32, max_tenants: u8, gpu_models: Vec<ModelView<'a>>, nodes: Vec<NodeView> },
    /// The state, and a request to decide.
    Asked(Asked<'a>),
    /// Idle GPUs for a gang; null if there is no such place.
    Found(Option<&'a [GpuIdx]>),
    /// The edit was made.
    Done {},
    /// The edit is not possible; the plan is as it was.
    Refused { why: &'a str },
}

#[derive(Serialize)]
struct ModelView<'a> {
    name: &'a str,
    mem_mib: u32,
    speed: f64,
}

#[derive(Serialize)]
struct NodeView {
    first_gpu: GpuIdx,
    gpus: u16,
    gpu_model: u8,
    cpu_milli: u32,
    host_mib: u32,
}

#[derive(Serialize)]
struct Asked<'a> {
    at_us: Time,
    /// Jobs that were registered since the last time.
    new: Vec<NewJob<'a>>,
    ready: &'a [JobIdx],
    left: &'a [JobIdx],
    pending: Vec<Waiting>,
    placed: Vec<Running<'a>>,
    idle: Vec<GpuIdx>,
    nodes_down: Vec<NodeIdx>,
}

#[derive(Serialize)]
struct NewJob<'a> {
    job: JobIdx,
    name: &'a str,
    profile_name: &'a str,
    submitted_us: Time,
    /// Seconds that it takes alone on the reference GPU, as declared.
    length_s: Option<f64>,
    #[serde(flatten)]
    spec: &'a Spec,
}

#[derive(Serialize)]
struct Waiting {
    job: JobIdx,
    attained_gpu_us: u64,
    done: f64,
    starts: u32,
}

#[derive(Serialize)]
struct Running<'a> {
    #[serde(flatten)]
    common: Waiting,
    gpus: &'a [GpuIdx],
    knobs: Knobs,
}

/// A message of the policy.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum Said {
    /// Looks for idle GPUs for the whole gang.
    Find { job: JobIdx, rule: Rule },
    /// Places a waiting job; with its own knobs, unless others are given.
    Place { job: JobIdx, gpus: Vec<GpuIdx>, knobs: Option<Knobs> },
    /// Takes a job off its GPUs.
    Release { job: JobIdx },
    /// The same, and keeps its process in host memory.
    Suspend { job: JobIdx },
    /// Changes how a placed job runs.
    Tune { job: JobIdx, knobs: Knobs },
    /// Asks to be called at this instant at the latest.
    Wake { at_us: u64 },
    /// The end of the decision.
    Decided {},
    /// The policy cannot decide.
    Failed { why: String },
}

impl External {
    /// Connects to the policy that listens on this socket.
    pub(crate) fn connect(at: &Path, names: Names) -> anyhow::Result<(Self, Failure)> {
        let to = UnixStream::connect(at).map_err(|error| {
            let what = format!("could not connect to the policy at {}: {error}", at.display());
            console::advise(
                what,
                "start the policy before the simulation; `roommate.lab` in Python does so",
            )
        })?;
        Self::over(to, names)
    }

    fn over(to: UnixStream, names: Names) -> anyhow::Result<(Self, Failure)> {
        let from = BufReader::new(to.try_clone().context("could not copy the policy's socket")?);
        let failure = Failure::default();
        let (told, begun, broken) = (0, false, false);
        Ok((Self { from, to, names, told, begun, broken, failure: failure.clone() }, failure))
    }

    /// Tells the state, then makes the policy's edits until it has decided.
    fn converse(&mut self, plan: &mut Plan<'_>) -> anyhow::Result<()> {
        if !self.begun {
            self.begun = true;
            self.tell(&begin(plan))?;
        }
        self.ask(plan)?;
        loop {
            let answer = match self.hear()? {
                Said::Decided {} => return Ok(()),
                Said::Failed { why } => anyhow::bail!("the policy failed: {why}"),
                Said::Find { job, rule } if exists(plan, job) => {
                    let found = placement::find(plan, job, rule);
                    self.tell(&Told::Found(found.as_deref()))?;
                    continue;
                }
                Said::Find { .. } => Err(NO_JOB),
                Said::Wake { at_us } if Time(at_us) <= plan.now => {
                    Err("a wake-up must be in the future")
                }
                Said::Wake { at_us } => {
                    plan.wake_at(Time(at_us));
                    Ok(())
                }
                edit => make(plan, edit),
            };
            self.tell(&match answer {
                Ok(()) => Told::Done {},
                Err(why) => Told::Refused { why },
            })?;
        }
    }

    fn ask(&mut self, plan: &Plan<'_>) -> anyhow::Result<()> {
        let first = std::mem::replace(&mut self.told, plan.jobs.len());
        let new = (first..plan.jobs.len()).map(|i| self.introduce(plan, JobIdx::from_usize(i)));
        let running = |job: JobIdx| {
            let hot = plan.job(job);
            Running { common: standing(plan, job), gpus: &hot.gpus, knobs: hot.knobs }
        };
        let idle = plan.gpus.indices().filter(|g| {
            let gpu = plan.gpu(*g);
            gpu.tenants.is_empty() && plan.node(gpu.node).up
        });
        let asked = Asked {
            at_us: plan.now,
            new: new.collect(),
            ready: plan.news.ready,
            left: plan.news.left,
            pending: plan.pending.iter().map(|job| standing(plan, job)).collect(),
            placed: plan.placed.iter().map(running).collect(),
            idle: idle.collect(),
            nodes_down: plan.nodes.indices().filter(|n| !plan.node(*n).up).collect(),
        };
        let line = line(&Told::Asked(asked))?;
        self.send(&line)
    }

    fn introduce<'a>(&'a self, plan: &'a Plan<'_>, job: JobIdx) -> NewJob<'a> {
        let spec = plan.spec(job);
        let name = |of: &'a [String], idx: usize| of.get(idx).map_or("", String::as_str);
        NewJob {
            job,
            name: name(&self.names.jobs, job.usize()),
            profile_name: name(&self.names.profiles, spec.profile.usize()),
            submitted_us: plan.job(job).submitted,
            length_s: plan.length_s(job),
            spec,
        }
    }

    fn tell(&mut self, message: &Told<'_>) -> anyhow::Result<()> {
        self.send(&line(message)?)
    }

    fn send(&mut self, line: &[u8]) -> anyhow::Result<()> {
        self.to.write_all(line).context("could not write to the policy")
    }

    fn hear(&mut self) -> anyhow::Result<Said> {
        let mut line = String::new();
        let read = (&mut self.from).take(LONGEST_LINE).read_line(&mut line);
        if read.context("could not read from the policy")? == 0 {
            anyhow::bail!("the policy closed the connection before it had decided");
        }
        serde_json::from_str(&line)
            .with_context(|| format!("invalid message from the policy: {:?}", excerpt(&line)))
    }
}

impl Policy for External {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        if self.broken {
            return;
        }
        let before = plan.mark();
        if let Err(error) = self.converse(plan) {
            plan.undo_to(before);
            self.broken = true;
            self.failure.set(error);
        }
    }
}

fn begin<'a>(plan: &'a Plan<'_>) -> Told<'a> {
    let model = |m: &'a roommate_core::cluster::GpuModel| ModelView {
        name: &m.name,
        mem_mib: m.mem_mib,
        speed: m.speed,
    };
    let node = |n: NodeIdx| {
        let of = plan.node(n);
        NodeView {
            first_gpu: of.first,
            gpus: of.size,
            gpu_model: of.gpu_model,
            cpu_milli: of.cpu_milli,
            host_mib: of.host_mib,
        }
    };
    Told::Begin {
        version: VERSION,
        max_tenants: plan.max_tenants,
        gpu_models: plan.gpu_models.iter().map(model).collect(),
        nodes: plan.nodes.indices().map(node).collect(),
    }
}

fn standing(plan: &Plan<'_>, job: JobIdx) -> Waiting {
    let (attained_gpu_us, done) = (plan.attained(job), plan.done(job));
    Waiting { job, attained_gpu_us, done, starts: plan.job(job).starts }
}

const NO_JOB: &str = "there is no such job";

fn exists(plan: &Plan<'_>, job: JobIdx) -> bool {
    plan.jobs.has(job)
}

/// Makes one edit; an error says why the plan refuses it.
fn make(plan: &mut Plan<'_>, edit: Said) -> Result<(), &'static str> {
    let (Said::Place { job, .. }
    | Said::Release { job }
    | Said::Suspend { job }
    | Said::Tune { job, .. }) = &edit
    else {
        return Ok(());
    };
    if !exists(plan, *job) {
        return Err(NO_JOB);
    }
    let made = match edit {
        Said::Place { job, gpus, knobs } => {
            let knobs = knobs.unwrap_or(plan.spec(job).knobs);
            plan.place(job, &gpus, knobs)
        }
        Said::Tune { job, knobs } => plan.tune(job, knobs),
        Said::Release { job } | Said::Suspend { job } if !plan.job(job).is_placed() => {
            Err(Infeasible::NotPlaced)
        }
        Said::Release { job } => {
            plan.release(job);
            Ok(())
        }
        Said::Suspend { job } => {
            plan.suspend(job);
            Ok(())
        }
        _ => Ok(()),
    };
    made.map_err(words)
}

/// Why an edit is not possible, for the author of a policy.
fn words(why: Infeasible) -> &'static str {
    match why {
        Infeasible::NotPending => "the job does not wait for GPUs",
        Infeasible::NotPlaced => "the job holds no GPUs",
        Infeasible::WrongCount => "fewer or more GPUs than the job can use",
        Infeasible::BadSet => "the GPUs are not ascending, or one is given twice or does not exist",
        Infeasible::Torn => "the GPUs of one task are on several nodes",
        Infeasible::Down => "the node of a GPU is down",
        Infeasible::WrongKind => "a GPU is of a model that the job may not use",
        Infeasible::Memory => "a GPU has not enough memory left",
        Infeasible::Share => "a GPU has not enough of its multiprocessors left",
        Infeasible::Knob => "a knob is outside its range",
        Infeasible::Slots => "a GPU has as many jobs as it may have",
        Infeasible::Cpu => "the node has not enough CPU left",
        Infeasible::Host => "the node has not enough memory left",
    }
}

fn line(message: &Told<'_>) -> anyhow::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(message).context("could not write a message")?;
    line.push(b'\n');
    Ok(line)
}

fn excerpt(line: &str) -> String {
    line.trim_end().chars().take(80).collect()
}

#[cfg(test)]
mod tests;
