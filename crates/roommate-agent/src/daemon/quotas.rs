//! What one user may have of a machine. The limits hold when a job is submitted or resized: a job
//! that was accepted is not taken away.

use crate::api::job_file::JobFile;
use crate::daemon::JobRecord;
use crate::daemon::store::JobRow;

/// Limits for each user.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quotas {
    /// Most jobs that have not ended.
    pub jobs: usize,
    /// Most devices that one job asks for.
    pub job_devices: u16,
    /// Most devices that all jobs ask for which have not ended.
    pub devices: u64,
    /// Most of each device that one job is promised, 0 to 1.
    pub share: f64,
    /// Most bytes of commands, environments and job files of jobs that have not ended.
    pub bytes: u64,
    /// Most requests at a time.
    pub requests: usize,
}

impl Default for Quotas {
    fn default() -> Self {
        Self {
            jobs: 20_000,
            job_devices: u16::MAX,
            devices: 1_000_000,
            share: 1.0,
            bytes: 512 << 20,
            requests: 32,
        }
    }
}

impl Quotas {
    /// Sets one limit: `jobs=100`.
    pub fn set(&mut self, text: &str) -> Result<(), String> {
        let names = "jobs, job-devices, devices, share, mib or requests";
        let (name, value) = text.split_once('=').ok_or(format!("expected {names}, and =NUMBER"))?;
        let wrong = || format!("{name}: {value:?} is not a number that can be a limit");
        let whole = || value.parse::<u32>().ok().filter(|n| *n > 0).ok_or_else(wrong);
        match name {
            "jobs" => self.jobs = whole()? as usize,
            "job-devices" => {
                self.job_devices = whole()?.try_into().map_err(|_| wrong())?;
            }
            "devices" => self.devices = whole()?.into(),
            "share" => {
                let share = value.parse().ok().filter(|s| *s > 0.0 && *s <= 1.0);
                self.share = share.ok_or_else(wrong)?;
            }
            "mib" => self.bytes = u64::from(whole()?) << 20,
            "requests" => self.requests = whole()? as usize,
            _ => return Err(format!("there is no limit {name:?}: expected {names}")),
        }
        Ok(())
    }

    /// Why another job does not fit beside those that its owner has.
    pub(crate) fn refusal<'a>(
        &self,
        (file, bytes): (&JobFile, u64),
        own: impl Iterator<Item = &'a JobRecord>,
    ) -> Option<(String, String)> {
        let mut used = (0, 0, 0);
        for record in own {
            used.0 += 1;
            used.1 += u64::from(record.row.file.devices);
            used.2 += record.bytes;
        }
        let (jobs, devices, stored) = used;
        let less = "wait until jobs of yours end, or cancel some with `roommate cancel`";
        let fewer = "ask for less, or have your administrator raise the limit";
        let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
        if jobs >= self.jobs {
            let what =
                format!("you have {jobs} jobs that have not ended; {} is the most", self.jobs);
            Some((what, less.into()))
        } else if file.devices > self.job_devices {
            let (wants, most) = (file.devices, self.job_devices);
            Some((format!("the job asks for {wants} devices; {most} is the most"), fewer.into()))
        } else if let Some(refusal) = self.share_refusal(file.share) {
            Some(refusal)
        } else if devices + u64::from(file.devices) > self.devices {
            let (wants, most) = (file.devices, self.devices);
            let what = format!(
                "your jobs ask for {devices} devices already, this one for {wants}; {most} is the \
                 most"
            );
            Some((what, less.into()))
        } else if stored + bytes > self.bytes {
            let what = format!(
                "commands and environments of your jobs have {} already, this one has {}; {} is \
                 the most",
                mib(stored),
                mib(bytes),
                mib(self.bytes)
            );
            Some((what, less.into()))
        } else {
            None
        }
    }

    /// Why a job may not have this share.
    pub(crate) fn share_refusal(&self, share: f64) -> Option<(String, String)> {
        let what = format!("the share is {share} of each device; {} is the most", self.share);
        let hint = "ask for less, or have your administrator raise the limit";
        (share > self.share).then(|| (what, hint.into()))
    }
}

/// Bytes of a submission, about as many as it takes in the store.
pub(crate) fn bytes_of(row: &JobRow) -> u64 {
    let strings = |map: &std::collections::BTreeMap<String, String>| -> usize {
        map.iter().map(|(k, v)| k.len() + v.len()).sum()
    };
    let words: usize = row.file.command.words().iter().map(String::len).sum();
    (words + strings(&row.env) + strings(&row.file.env)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::caller::User;
    use std::path::Path;

    fn job(text: &str) -> JobRecord {
        let file = JobFile::read(text, Path::new("j.yaml")).unwrap();
        let row = JobRow { file, env: [].into(), owner: User::this(), submitted_unix_us: 0 };
        JobRecord::new(0, "j".into(), std::sync::Arc::new(row))
    }

    #[test]
    fn a_refusal_says_what_is_used_and_what_to_do() {
        let mut quotas = Quotas::default();
        for limit in ["jobs=2", "job-devices=3", "devices=4", "share=0.5", "mib=1"] {
            quotas.set(limit).unwrap();
        }
        let two = job("command: x\ndevices: 2\nshare: 0.5");
        let refused = |text: &str, own: &[&JobRecord]| {
            let new = job(text);
            let refusal = quotas.refusal((&new.row.file, new.bytes), own.iter().copied());
            refusal.map_or("accepted".into(), |(what, hint)| {
                assert!(!hint.is_empty());
                what
            })
        };
        let check = |text: &str, own: &[&JobRecord], what: &str| {
            assert_eq!(refused(text, own), what, "{text}");
        };
        check("{command: x, devices: 2, share: 0.5}", &[&two], "accepted");
        check("command: x", &[&two, &two], "you have 2 jobs that have not ended; 2 is the most");
        check("{command: x, devices: 4}", &[], "the job asks for 4 devices; 3 is the most");
        check("{command: x, share: 0.6}", &[], "the share is 0.6 of each device; 0.5 is the most");
        check(
            "{command: x, devices: 3}",
            &[&two],
            "your jobs ask for 2 devices already, this one for 3; 4 is the most",
        );
        let long = format!("command: [{}]", "x".repeat(1 << 20));
        assert!(refused(&long, &[&two]).ends_with("this one has 1.0 MiB; 1.0 MiB is the most"));
        for bad in ["jobs", "jobs=0", "jobs=-1", "share=2", "share=nan", "jobs=1e9", "job=1"] {
            assert!(quotas.clone().set(bad).is_err(), "{bad}");
        }
    }
}
