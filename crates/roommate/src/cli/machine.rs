//! Flags of the commands that work with real processes on this machine.

use clap::{Args, ValueEnum};
use std::net::SocketAddr;
use std::path::PathBuf;

/// Where a daemon keeps its state.
#[derive(Args, Debug, Clone)]
pub(crate) struct StateArg {
    /// Folder of the daemon's state; `$ROOMMATE_STATE`, or a folder under your home, unless given
    #[arg(long, value_name = "DIR")]
    pub(crate) state: Option<PathBuf>,
}

/// Which daemon is meant.
#[derive(Args, Debug, Clone)]
pub(crate) struct At {
    #[command(flatten)]
    pub(crate) state: StateArg,
    /// Reach the daemon over HTTP at http://HOST:PORT instead; `$ROOMMATE_SERVER`, unless given
    #[arg(long, value_name = "URL", conflicts_with = "state")]
    pub(crate) server: Option<String>,
    /// File with the token for --server; `$ROOMMATE_HTTP_TOKEN`, or the one in the state, unless given
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Listing {
    /// For people
    Table,
    /// For people with a wide screen
    Wide,
    /// One JSON document
    Json,
    /// One YAML document
    Yaml,
}

/// What a machine shares.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum DeviceKind {
    /// Its cores
    Cpu,
    /// Its NVIDIA GPUs
    Cuda,
}

/// How a machine decides.
#[derive(Args, Debug, Clone)]
pub(crate) struct Deciding {
    /// The policy; gandiva, unless given
    #[arg(long, short)]
    pub(crate) policy: Option<String>,
    /// Set a parameter of the policy: name=value, the value as JSON or plain text
    #[arg(long = "set", value_name = "NAME=VALUE")]
    pub(crate) set: Vec<String>,
    /// What is shared; the cores, unless given, or what the state was begun with
    #[arg(long, value_enum, value_name = "KIND")]
    pub(crate) device: Option<DeviceKind>,
    /// Devices to cut the machine into; as many as it has cores or GPUs, unless given
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) devices: Option<u16>,
    /// Leave the kernel's groups alone: tenants keep their shares by themselves
    #[arg(long)]
    pub(crate) no_cgroups: bool,
    /// Seconds of the pause after a job's first failure; doubles with each further one
    #[arg(long, value_name = "S", default_value_t = 5.0, value_parser = super::seconds)]
    pub(crate) backoff: f64,
    /// Seed of the policy's randomness
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Tell the policy what `profile measure` found: pairs, predictions and latency curves of every
    /// file PREFIX*.jsonl; jobs name theirs with `profile: TASK@BATCH`
    #[arg(long, value_name = "PREFIX")]
    pub(crate) profiles: Option<PathBuf>,
    /// Tell the policy how the speed of these profiles depends on CPU and host memory: a table with
    /// columns `model,cpus,mem_gb,rel_throughput`
    #[arg(long, value_name = "FILE", requires = "profiles")]
    pub(crate) sensitivity: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub(crate) struct Up {
    #[command(flatten)]
    pub(crate) state: StateArg,
    #[command(flatten)]
    pub(crate) deciding: Deciding,
    /// Also listen for HTTP at this address; port 0 takes any that is free
    #[arg(long, value_name = "ADDR:PORT")]
    pub(crate) http: Option<SocketAddr>,
    /// Let --http be an address that other machines can reach; nothing is encrypted there
    #[arg(long, requires = "http")]
    pub(crate) http_beyond_loopback: bool,
    #[command(flatten)]
    pub(crate) kept: Kept,
}

/// How much a daemon keeps.
#[derive(Args, Debug, Clone)]
pub(crate) struct Kept {
    /// MiB after which a job's log is cut
    #[arg(long, value_name = "MIB", default_value_t = 16.0, value_parser = mib)]
    pub(crate) log_mib: f64,
    /// Parts of a log that are kept after they were cut off
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) log_parts: u16,
    /// Days for which the logs of ended jobs are kept
    #[arg(long, value_name = "DAYS", default_value_t = 14.0, value_parser = super::seconds)]
    pub(crate) keep_days: f64,
    /// MiB of logs of ended jobs that are kept; the oldest go first
    #[arg(long, value_name = "MIB", default_value_t = 4096.0, value_parser = mib)]
    pub(crate) keep_mib: f64,
    /// MiB after which a new part of the journal is begun when no job is alive; four times as many while
    /// jobs are
    #[arg(long, value_name = "MIB", default_value_t = 16.0, value_parser = mib)]
    pub(crate) journal_mib: f64,
    /// Earlier parts of the journal that are kept
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) journal_parts: u16,
}

fn mib(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|v| (0.001..=1e9).contains(v));
    value.ok_or_else(|| "expected a number from 0.001 to 1e9".into())
}

#[derive(Args, Debug)]
pub(crate) struct Submit {
    /// The job files, `-` for standard input
    #[arg(required_unless_present = "example")]
    pub(crate) files: Vec<PathBuf>,
    /// Print a job file that shows every field
    #[arg(long, conflicts_with = "files")]
    pub(crate) example: bool,
    /// Check everything, submit nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    #[command(flatten)]
    pub(crate) at: At,
}

#[derive(Args, Debug)]
pub(crate) struct Ps {
    /// Leave out jobs that have ended
    #[arg(long)]
    pub(crate) alive: bool,
    #[command(flatten)]
    pub(crate) at: At,
    /// How to print the result
    #[arg(long, short, value_enum, default_value_t = Listing::Table)]
    pub(crate) output: Listing,
}

#[derive(Args, Debug)]
pub(crate) struct Top {
    /// Print one frame as text and end; also where standard output is no terminal
    #[arg(long)]
    pub(crate) once: bool,
    /// Size of the printed frame in columns and rows; as high as it needs to be, unless given
    #[arg(long, value_name = "WxH", value_parser = size, requires = "once")]
    pub(crate) size: Option<(u16, u16)>,
    /// Seconds between two looks
    #[arg(long, value_name = "S", default_value_t = 1.0, value_parser = pause)]
    pub(crate) every: f64,
    #[command(flatten)]
    pub(crate) at: At,
}

fn size(text: &str) -> Result<(u16, u16), String> {
    let both = text.split_once('x').and_then(|(w, h)| Some((w.parse().ok()?, h.parse().ok()?)));
    let sane = both.filter(|(w, h)| (1..=1000).contains(w) && (1..=1000).contains(h));
    sane.ok_or_else(|| "expected columns and rows, like 80x24".into())
}

fn pause(text: &str) -> Result<f64, String> {
    let seconds = super::seconds(text)?;
    if seconds < 0.1 { Err("expected at least 0.1".into()) } else { Ok(seconds) }
}

#[derive(Args, Debug)]
pub(crate) struct Describe {
    /// Name of the job; without one, the machine
    pub(crate) job: Option<String>,
    #[command(flatten)]
    pub(crate) at: At,
    /// How to print the result
    #[arg(long, short, value_enum, default_value_t = Listing::Table)]
    pub(crate) output: Listing,
}

#[derive(Args, Debug)]
pub(crate) struct Logs {
    /// Name of the job
    pub(crate) job: String,
    /// Go on until the job ends
    #[arg(long, short)]
    pub(crate) follow: bool,
    #[command(flatten)]
    pub(crate) at: At,
}

#[derive(Args, Debug)]
pub(crate) struct OnJobs {
    /// Names of the jobs
    #[arg(required = true)]
    pub(crate) jobs: Vec<String>,
    #[command(flatten)]
    pub(crate) at: At,
}

#[derive(Args, Debug)]
pub(crate) struct Resize {
    /// Name of the job
    pub(crate) job: String,
    /// The batch size; 0 leaves it to the policy again
    #[arg(long, value_name = "N", required_unless_present = "share")]
    pub(crate) batch: Option<u32>,
    /// The most of each of its devices that it may use, 0 to 1; 0 leaves it to the policy again
    #[arg(long, value_name = "PART", value_parser = super::chance)]
    pub(crate) share: Option<f64>,
    #[command(flatten)]
    pub(crate) at: At,
}

#[derive(Args, Debug)]
pub(crate) struct Events {
    /// Go on as things happen
    #[arg(long, short)]
    pub(crate) follow: bool,
    #[command(flatten)]
    pub(crate) at: At,
    /// How to print the result; json prints the lines of the journal
    #[arg(long, short, value_enum, default_value_t = Listing::Table)]
    pub(crate) output: Listing,
}

#[derive(Args, Debug)]
pub(crate) struct Down {
    /// Stop the jobs as well; otherwise they go on, and the next daemon finds them
    #[arg(long)]
    pub(crate) stop_jobs: bool,
    #[command(flatten)]
    pub(crate) at: At,
}

#[derive(Args, Debug)]
pub(crate) struct Run {
    /// The mix: a list of jobs, and the policy
    pub(crate) mix: PathBuf,
    #[command(flatten)]
    pub(crate) deciding: Deciding,
    /// Run the mix with one job per device first (all devices, first come, first served), and compare
    #[arg(long)]
    pub(crate) versus_exclusive: bool,
    /// Have the simulator predict when each job ends, from its speed alone, and compare; runs the jobs one at
    /// a time first, unless there are --profiles
    #[arg(long)]
    pub(crate) predict: bool,
    /// Seconds that a job takes beside its steps, for --predict with --profiles; what was measured,
    /// unless given
    #[arg(long, value_name = "S", value_parser = super::seconds, requires = "profiles")]
    pub(crate) start: Option<f64>,
    /// Write everything that happened here (JSON lines; compressed if it ends in .gz)
    #[arg(long, value_name = "FILE")]
    pub(crate) journal: Option<PathBuf>,
    /// Write an HTML report
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
    /// How to print the result
    #[arg(long, short, value_enum, default_value_t = super::Output::Table)]
    pub(crate) output: super::Output,
}

/// Not for people: what runs between a daemon and a job.
#[derive(Args, Debug)]
pub(crate) struct Keeper {
    /// Folder of the attempt
    pub(crate) folder: PathBuf,
    /// Become the command of the attempt, as a child of this keeper
    #[arg(long = "for", value_name = "PID")]
    pub(crate) keeper: Option<u32>,
}

/// Not for people: what a daemon runs to learn what a process can do on a GPU.
#[derive(Args, Debug)]
pub(crate) struct GpuTest {
    /// Number of the GPU among those that are visible
    #[arg(long, default_value_t = 0)]
    pub(crate) device: u32,
    /// Try to allocate so much, which is meant to be above a limit; 0 = do not
    #[arg(long, value_name = "MIB", default_value_t = 0)]
    pub(crate) over_mib: u64,
}
