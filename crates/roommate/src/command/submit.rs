//! `roommate submit`: sends job files to the daemon.

use crate::cli::machine::Submit;
use crate::console;
use anyhow::Context;
use roommate_agent::api::control::{self, Reply, Request};
use roommate_agent::api::job_file::{EXAMPLE, JobFile, LONGEST_FILE};
use roommate_agent::{AgentError, Client};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Variables that jobs need to find their programs, libraries and data. Others are not passed on
/// unless the user says so: they often hold passwords and keys of services.
const USUALLY_PASSED: &[&str] = &[
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LANGUAGE",
    "LC_*",
    "TZ",
    "TMPDIR",
    "XDG_*",
    "LD_LIBRARY_PATH",
    "LIBRARY_PATH",
    "CPATH",
    "VIRTUAL_ENV",
    "CONDA_*",
    "PYTHON*",
    "CUDA_HOME",
    "CUDA_PATH",
    "OMP_*",
    "MKL_*",
    "OPENBLAS_*",
    "NCCL_*",
    "TORCH_HOME",
    "HF_HOME",
    "HF_HUB_OFFLINE",
];

/// What of the environment of this process is passed on to a job.
#[derive(Clone, Debug, Default)]
pub(super) struct Environment {
    /// Everything.
    pub(super) all: bool,
    /// Also these variables; a `*` at the end stands for any ending.
    pub(super) also: Vec<String>,
}

impl Environment {
    fn passes(&self, name: &str) -> bool {
        let matches = |pattern: &str| match pattern.strip_suffix('*') {
            Some(start) => name.starts_with(start),
            None => name == pattern,
        };
        let also = self.also.iter().map(String::as_str);
        self.all || USUALLY_PASSED.iter().copied().chain(also).any(matches)
    }
}

/// How long to wait for a daemon that is being restarted.
const RESTART_WAIT: Duration = Duration::from_secs(10);

pub(super) fn run(args: &Submit) -> anyhow::Result<ExitCode> {
    if args.example {
        console::print(EXAMPLE)?;
        return Ok(ExitCode::SUCCESS);
    }
    // All files are read before the first is submitted, so that an error in one leaves nothing
    // submitted.
    let jobs: Vec<JobFile> = args.files.iter().map(|f| read(f)).collect::<anyhow::Result<_>>()?;
    let client = super::machine::client(&args.at)?;
    let passed = Environment { all: args.env_all, also: args.env.clone() };
    for file in jobs {
        let reply = send(&client, &request(file, args.dry_run, &passed))?;
        match reply {
            Reply::Submitted { name } => console::print(&(console::printable(&name) + "\n"))?,
            Reply::Done { what } => console::print(&format!("{what}\n"))?,
            _ => anyhow::bail!("unexpected reply from the daemon"),
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The submit request for a job, with what it needs of the environment of this process.
pub(super) fn request(file: JobFile, dry_run: bool, passed: &Environment) -> Request {
    Request::Submit(Box::new(submission(file, dry_run, passed)))
}

/// The same as a submission.
pub(super) fn submission(file: JobFile, dry_run: bool, passed: &Environment) -> control::Submit {
    // Variables that are not UTF-8 cannot be sent as JSON and are left out.
    let env = std::env::vars_os()
        .filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)))
        .filter(|(name, _)| passed.passes(name));
    let key = format!("{}-{:?}", std::process::id(), std::time::SystemTime::now());
    control::Submit { file, env: env.collect(), key, dry_run }
}

/// Submits, and repeats the request if the connection breaks: a submission is accepted only once.
fn send(client: &Client, request: &Request) -> Result<Reply, AgentError> {
    if let Request::Submit(submit) = request {
        submit.check().map_err(|what| AgentError::Refused { what, hint: None })?;
    }
    let end = Instant::now() + RESTART_WAIT;
    let mut spoken = false;
    loop {
        match client.ask(request) {
            Err(AgentError::Lost { .. }) if Instant::now() < end => spoken = true,
            Err(AgentError::NoDaemon { .. } | AgentError::NoServer { .. })
                if spoken && Instant::now() < end => {}
            other => return other,
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Reads a job file; relative paths in it become absolute.
pub(super) fn read(path: &Path) -> anyhow::Result<JobFile> {
    let here = std::env::current_dir().context("could not find the current folder")?;
    if path == Path::new("-") {
        let text = limited(std::io::stdin().lock()).context("could not read standard input")?;
        let text = String::from_utf8(text)
            .map_err(|_| anyhow::anyhow!("could not read standard input: it is not text"))?;
        return Ok(JobFile::read(&text, &here.join("-")).map_err(AgentError::from)?);
    }
    let text = text_of(path)?;
    Ok(JobFile::read(&text, &here.join(path)).map_err(AgentError::from)?)
}

pub(super) fn text_of(path: &Path) -> anyhow::Result<String> {
    let shown = path.display().to_string();
    let bytes = std::fs::File::open(path).and_then(limited).map_err(|e| {
        let hint = "`roommate submit --example` prints one to begin with";
        console::advise(format!("could not read {shown:?}: {e}"), hint)
    })?;
    String::from_utf8(bytes)
        .map_err(|_| anyhow::anyhow!("could not read {shown:?}: it is not text"))
}

/// What is read, unless it is too long for a job file.
fn limited(from: impl Read) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(LONGEST_FILE as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > LONGEST_FILE {
        let what = format!("it has more than {LONGEST_FILE} bytes, the most of a job file");
        return Err(std::io::Error::new(std::io::ErrorKind::FileTooLarge, what));
    }
    Ok(bytes)
}

/// The absolute path, without checking that it exists.
pub(super) fn absolute(path: &Path) -> anyhow::Result<PathBuf> {
    Ok(std::env::current_dir().context("could not find the current folder")?.join(path))
}
