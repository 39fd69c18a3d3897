//! What a job may ask for. The client checks a job before it sends it, the daemon before it keeps
//! anything of it: whoever speaks to the daemon without the client gets the same answers.

use crate::api::job_file::JobFile;
use crate::protocol::BatchRange;
use roommate_core::job::Retries;
use roommate_core::number::{Number, OutOfRange, Positive};
use std::collections::BTreeMap;
use std::path::Path;

/// Most characters in the name of a job, a team or a profile.
pub(crate) const LONGEST_NAME: usize = 100;
/// Most bytes of an argument or of a variable with its name, as Linux has it (`MAX_ARG_STRLEN`).
const LONGEST_WORD: usize = (128 << 10) - 2;
/// Most bytes of all arguments and variables. Linux takes a quarter of the stack's limit, usually
/// 2 MiB; the rest is for pointers and for what the daemon adds.
const MOST_BYTES: usize = 1 << 20;
/// Most arguments and most variables.
const MOST_WORDS: usize = 10_000;
/// Most bytes of a path (`PATH_MAX`).
const LONGEST_PATH: usize = 4095;
/// Most retries of a class.
const MOST_RETRIES: u16 = 10_000;
/// Most CPU cores for each device.
const MOST_CPUS: f64 = 100_000.0;

impl JobFile {
    /// What is wrong with the job.
    pub fn check(&self) -> Result<(), String> {
        check_name(self.name())?;
        check_label("team", self.team.as_deref())?;
        check_label("profile", self.profile.as_deref())?;
        let words = self.command.words();
        if words.first().is_none_or(|w| w.trim().is_empty())
            || words.last().is_some_and(|w| w.trim().is_empty())
        {
            return Err("command: there is nothing to run".into());
        }
        self.check_words(&BTreeMap::new())?;
        check_path("workdir", self.workdir.as_deref())?;
        check_path("checkpoint", self.checkpoint.as_deref())?;
        if self.devices == 0 {
            return Err("devices: expected at least 1, found 0".into());
        }
        if !(0.0..=1.0).contains(&self.share) {
            return Err(format!("share: expected 0 to 1, found {}", self.share));
        }
        if let Some(BatchRange { min, size, max }) = self.batch.filter(|b| !b.is_sane()) {
            return Err(format!(
                "batch: expected 1 <= min <= size <= max, found {min}, {size}, {max}"
            ));
        }
        let Retries { user, infra, unknown } = self.retries;
        if let Some(n) = [user, infra, unknown].into_iter().find(|n| *n > MOST_RETRIES) {
            return Err(format!("retries: expected at most {MOST_RETRIES}, found {n}"));
        }
        if let Some(most) = self.max_slowdown.filter(|m| !(1.0..=1000.0).contains(m)) {
            return Err(format!("max_slowdown: expected 1 to 1000, found {most}"));
        }
        self.check_numbers()?;
        self.check_service()
    }

    fn check_numbers(&self) -> Result<(), String> {
        let above_0 = [("steps", self.steps), ("step_s", self.step_s), ("cpus", self.cpus)];
        for (field, value) in above_0 {
            if let Some(value) = value.filter(|v| !v.is_finite() || *v <= 0.0) {
                return Err(format!("{field}: expected a number above 0, found {value:?}"));
            }
        }
        let within = |field: &'static str| move |e: OutOfRange| format!("{field}: {e}");
        self.steps.map_or(Ok(Number::MOST), Number::try_from).map_err(within("steps"))?;
        self.step_s.map_or(Ok(Positive::MOST), Positive::try_from).map_err(within("step_s"))?;
        if let Some(cpus) = self.cpus.filter(|c| *c > MOST_CPUS) {
            return Err(format!("cpus: expected at most {MOST_CPUS}, found {cpus}"));
        }
        let Some(stages) = self.stages_s else { return Ok(()) };
        for stage in stages {
            Number::try_from(stage).map_err(within("stages_s"))?;
        }
        let sum_s: f64 = stages.iter().sum();
        if sum_s > 0.0 {
            Positive::try_from(sum_s).map_err(|e| format!("stages_s: in all, {e}"))?;
        }
        Ok(())
    }

    /// What is wrong with its arguments and variables, of which these are the submitter's: a
    /// process could not be started with them.
    pub(crate) fn check_words(&self, env: &BTreeMap<String, String>) -> Result<(), String> {
        let words = self.command.words();
        if words.iter().any(|w| w.contains('\0')) {
            return Err("command: a NUL character cannot be passed to a program".into());
        }
        let all = || env.iter().chain(&self.env);
        for (key, value) in all() {
            if key.is_empty() || key.contains(['=', '\0']) {
                return Err(format!("env: {} cannot be the name of a variable", quoted(key)));
            }
            if value.contains('\0') {
                let key = quoted(key);
                return Err(format!("env: the value of {key} has a NUL character"));
            }
        }
        let (arguments, variables) = (words.len(), all().count());
        for (field, n) in [("command", arguments), ("env", variables)] {
            if n > MOST_WORDS {
                return Err(format!("{field}: expected at most {MOST_WORDS} words, found {n}"));
            }
        }
        let long = |bytes: usize| {
            format!(
                "of {bytes} bytes is longer than {LONGEST_WORD}, the most that Linux passes to a \
                 program"
            )
        };
        if let Some(word) = words.iter().find(|w| w.len() > LONGEST_WORD) {
            return Err(format!("command: an argument {}", long(word.len())));
        }
        let bytes = |(key, value): (&String, &String)| key.len() + value.len();
        if let Some((key, value)) = all().find(|v| bytes(*v) > LONGEST_WORD) {
            let long = long(bytes((key, value)));
            return Err(format!("env: the variable {} {long}", quoted(key)));
        }
        let sum = words.iter().map(String::len).sum::<usize>() + all().map(bytes).sum::<usize>();
        if sum > MOST_BYTES {
            return Err(format!(
                "command and env: {sum} bytes in all, the most that is passed to a program is \
                 {MOST_BYTES}"
            ));
        }
        Ok(())
    }
}

fn check_name(name: &str) -> Result<(), String> {
    let plain = |c: char| c.is_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || !name.chars().all(plain) {
        let found = quoted(name);
        return Err(format!("name: expected letters, digits, `-`, `_` and `.`, found {found}"));
    }
    if name.starts_with('.') {
        let found = quoted(name);
        return Err(format!("name: expected a name that does not begin with `.`, found {found}"));
    }
    check_length("name", name)
}

/// Names of teams and profiles, which people read in terminals.
pub(super) fn check_label(field: &str, text: Option<&str>) -> Result<(), String> {
    let Some(text) = text else { return Ok(()) };
    if text.is_empty() || !text.chars().all(is_printable) {
        return Err(format!("{field}: expected printable characters, found {}", quoted(text)));
    }
    check_length(field, text)
}

fn check_length(field: &str, text: &str) -> Result<(), String> {
    let n = text.chars().count();
    if n > LONGEST_NAME {
        let found = format!("{n}: {}", quoted(text));
        return Err(format!("{field}: expected at most {LONGEST_NAME} characters, found {found}"));
    }
    Ok(())
}

/// Neither a control character nor one that changes the order or the place of others.
fn is_printable(c: char) -> bool {
    let directs = matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}');
    let joins = matches!(c, '\u{2060}'..='\u{206f}' | '\u{feff}');
    !(c.is_control() || directs || joins)
}

fn check_path(field: &str, path: Option<&Path>) -> Result<(), String> {
    let Some(path) = path else { return Ok(()) };
    let Some(text) = path.to_str() else {
        return Err(format!(
            "{field}: expected a path in UTF-8, found {:?}",
            path.display().to_string()
        ));
    };
    if text.contains('\0') {
        return Err(format!("{field}: a path has no NUL character, found {}", quoted(text)));
    }
    if text.len() > LONGEST_PATH {
        let n = text.len();
        return Err(format!("{field}: expected at most {LONGEST_PATH} bytes, found {n}"));
    }
    Ok(())
}

/// A path in a request: the daemon does not run in the folder of its user.
pub(crate) fn check_absolute(field: &str, path: &Path) -> Result<(), String> {
    if path.is_absolute() {
        return Ok(());
    }
    let found = quoted(&path.display().to_string());
    Err(format!("{field}: expected an absolute path, found {found}"))
}

/// Text in quotes, as long as fits into a message.
pub(crate) fn quoted(text: &str) -> String {
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{:?}...", &text[..end]),
        None => format!("{text:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::job_file::Command;

    fn job(change: impl FnOnce(&mut JobFile)) -> JobFile {
        let mut job = JobFile::read("command: x", Path::new("/dir/job.yaml")).unwrap();
        change(&mut job);
        job
    }

    fn refused(change: impl FnOnce(&mut JobFile), what: &str) {
        let error = job(change).check().unwrap_err();
        assert!(error.starts_with(what), "{error}");
    }

    #[test]
    fn numbers_out_of_bounds_are_refused() {
        let range = |field: &str, least: &str| format!("{field}: expected a number from {least}");
        refused(|j| j.steps = Some(-5.0), "steps: expected a number above 0, found -5");
        refused(|j| j.steps = Some(f64::NAN), "steps: expected a number above 0, found NaN");
        refused(|j| j.steps = Some(1e300), &range("steps", "0.0 to 1e15, found 1e300"));
        refused(|j| j.step_s = Some(0.0), "step_s: expected a number above 0, found 0");
        refused(|j| j.step_s = Some(1e-320), &range("step_s", "1e-9 to 1e15, found 1e-320"));
        refused(|j| j.step_s = Some(1e308), &range("step_s", "1e-9 to 1e15, found 1e308"));
        refused(|j| j.cpus = Some(f64::INFINITY), "cpus: expected a number above 0, found inf");
        refused(|j| j.cpus = Some(1e9), "cpus: expected at most 100000, found 1000000000");
        let stages = |all| move |j: &mut JobFile| j.stages_s = Some(all);
        refused(stages([1e308, 1e308, 0.0, 0.0]), &range("stages_s", "0.0 to 1e15"));
        refused(stages([1.0, -1.0, 0.0, 0.0]), &range("stages_s", "0.0 to 1e15, found -1.0"));
        refused(stages([1e15, 1e15, 0.0, 0.0]), "stages_s: in all, expected a number from");
        refused(stages([1e-320, 0.0, 0.0, 0.0]), "stages_s: in all, expected a number from");
        refused(|j| j.share = -1.0, "share: expected 0 to 1, found -1");
        refused(|j| j.share = f64::NAN, "share: expected 0 to 1, found NaN");
        refused(|j| j.devices = 0, "devices: expected at least 1");
        refused(|j| j.retries = 60_000.into(), "retries: expected at most 10000, found 60000");
        let none = BatchRange { size: 0, min: 0, max: 0 };
        refused(|j| j.batch = Some(none), "batch: expected 1 <= min <= size <= max, found 0, 0, 0");
        let most = job(|j| {
            (j.steps, j.step_s, j.stages_s) = (Some(1e15), Some(1e-9), Some([0.0; 4]));
        });
        assert_eq!(most.check(), Ok(()));
    }

    #[test]
    fn names_are_short_and_plain() {
        let name = |name: &str| {
            let name = Some(name.to_string());
            move |j: &mut JobFile| j.name = name
        };
        let plain = "name: expected letters, digits, `-`, `_` and `.`, found";
        for bad in ["", "../../x", "a b", "\u{1b}[2J", "a\0", "a\n", "\u{202e}x"] {
            refused(name(bad), plain);
        }
        refused(name(".x"), "name: expected a name that does not begin with `.`");
        let long = "x".repeat(1_000_000);
        refused(name(&long), "name: expected at most 100 characters, found 1000000: \"xxx");
        assert!(job(name(&long)).check().unwrap_err().len() < 200);
        assert_eq!(job(name("größe-1.b_2")).check(), Ok(()));
        for bad in ["", "\u{1b}[2J", "a\u{7}", "a\u{202e}b", "a\u{200b}"] {
            refused(|j| j.team = Some(bad.into()), "team: expected printable characters, found");
            refused(|j| j.profile = Some(bad.into()), "profile: expected printable");
        }
        refused(|j| j.team = Some("x".repeat(101)), "team: expected at most 100 characters");
        let spoken = job(|j| {
            (j.team, j.profile) = (Some("our team (2)".into()), Some("vit-b16@32".into()));
        });
        assert_eq!(spoken.check(), Ok(()));
    }

    #[test]
    fn what_no_program_can_be_started_with_is_refused() {
        let words = |words: &[&str]| Command::Words(words.iter().map(|w| (*w).into()).collect());
        for none in [words(&[]), words(&["", "x"]), Command::Line("  ".into())] {
            refused(|j| j.command = none, "command: there is nothing to run");
        }
        refused(|j| j.command = words(&["a", "b\0c"]), "command: a NUL character cannot");
        refused(|j| j.command = Command::Line("a\0b".into()), "command: a NUL character cannot");
        let long = "x".repeat(LONGEST_WORD + 1);
        let says = "command: an argument of 131071 bytes is longer than 131070, the most that";
        refused(|j| j.command = Command::Line(long.clone()), says);
        let many = vec!["x".to_string(); MOST_WORDS + 1];
        refused(|j| j.command = Command::Words(many), "command: expected at most 10000 words");
        let large = vec!["x".repeat(100_000); 11];
        let says = "command and env: 1100000 bytes in all, the most that is passed to a program is";
        refused(|j| j.command = Command::Words(large), says);
        let env = |key: &str, value: &str| {
            let env = BTreeMap::from([(key.to_string(), value.to_string())]);
            move |j: &mut JobFile| j.env = env
        };
        refused(env("A", "b\0"), "env: the value of \"A\" has a NUL character");
        refused(env("", "b"), "env: \"\" cannot be the name of a variable");
        refused(env("A=B", "b"), "env: \"A=B\" cannot be the name of a variable");
        refused(env("A", &long), "env: the variable \"A\" of 131072 bytes is longer than");
        let own = job(env("A", &"x".repeat(100_000)));
        assert_eq!(own.check(), Ok(()));
        let more = (0..11).map(|i| (format!("V{i}"), "x".repeat(90_000))).collect();
        assert!(own.check_words(&more).unwrap_err().starts_with("command and env: 1090029 bytes"));
        refused(|j| j.workdir = Some("/a\0b".into()), "workdir: a path has no NUL character");
        refused(|j| j.checkpoint = Some("x".repeat(5_000).into()), "checkpoint: expected at most");
    }

    /// The longest words that are accepted really start a program.
    #[test]
    fn what_is_accepted_can_be_started() {
        let mut job = job(|j| {
            let mut words = vec!["x".repeat(LONGEST_WORD); 6];
            words.insert(0, "true".into());
            j.command = Command::Words(words);
        });
        job.env.insert("V".into(), "x".repeat(LONGEST_WORD - 1));
        let short = (0..5_000).map(|i| (format!("S{i:05}"), String::new())).collect();
        assert_eq!(job.check_words(&short), Ok(()));
        let words = job.command.words();
        let mut program = std::process::Command::new(&words[0]);
        let status = program.args(&words[1..]).envs(&job.env).envs(&short).status();
        assert!(status.unwrap().success());
    }
}
