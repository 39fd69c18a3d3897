//! Which container has which places, and the token by which its processes are known. Kept in a
//! file: the kubelet says it once, and containers outlive the agent.

use roommate_core::math::hash::fnv1a;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// A container of a pod.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct OfPod {
    pub(super) namespace: String,
    pub(super) pod: String,
    pub(super) container: String,
}

/// Places that were given to a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Given {
    /// The places, sorted.
    pub(super) places: Vec<String>,
    /// What its processes say when they connect.
    pub(super) token: String,
    /// Whose they are, once it is known: before its first start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) of: Option<OfPod>,
    /// The variables of its devices, with which it was started last.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) env: BTreeMap<String, String>,
}

impl Given {
    /// A short name of these places, the same for the same places.
    pub(super) fn name(places: &[String]) -> String {
        format!("{:016x}", fnv1a(places.join(" ").as_bytes()))
    }
}

/// All places that were given.
#[derive(Debug, Default)]
pub(super) struct Places {
    file: PathBuf,
    given: Vec<Given>,
}

impl Places {
    /// Reads the file. One that cannot be read is set aside: its containers go on, without the SDK.
    pub(super) fn open(file: &Path) -> io::Result<(Self, Option<String>)> {
        let mut told = None;
        let given = match fs::read(file) {
            Ok(bytes) => serde_json::from_slice(&bytes).unwrap_or_else(|e| {
                let aside = file.with_extension("damaged");
                let moved = fs::rename(file, &aside).map(|()| aside.display().to_string());
                let moved = moved.unwrap_or_else(|e| format!("nowhere: {e}"));
                told = Some(format!("{} is damaged ({e}); moved to {moved}", file.display()));
                Vec::new()
            }),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(e) => return Err(e),
        };
        Ok((Self { file: file.into(), given }, told))
    }

    /// The kubelet gives a container these places. Whoever had one of them before is gone.
    pub(super) fn give(&mut self, mut places: Vec<String>, token: String) -> io::Result<()> {
        places.sort_unstable();
        self.given.retain(|g| !g.places.iter().any(|p| places.contains(p)));
        self.given.push(Given { places, token, of: None, env: BTreeMap::new() });
        self.write()
    }

    /// The container with these places is this one, and is started with these variables.
    pub(super) fn start(
        &mut self,
        mut places: Vec<String>,
        of: &OfPod,
        env: BTreeMap<String, String>,
    ) -> io::Result<bool> {
        places.sort_unstable();
        self.given.retain(|g| g.places == places || g.of.as_ref() != Some(of));
        let Some(given) = self.given.iter_mut().find(|g| g.places == places) else {
            return Ok(false);
        };
        (given.of, given.env) = (Some(of.clone()), env);
        self.write().map(|()| true)
    }

    /// What a container was given.
    pub(super) fn of(&self, of: &OfPod) -> Option<&Given> {
        self.given.iter().find(|g| g.of.as_ref() == Some(of))
    }

    /// The tokens of all containers.
    pub(super) fn tokens(&self) -> BTreeSet<String> {
        self.given.iter().map(|g| g.token.clone()).collect()
    }

    /// Forgets what pods had that are not there any more. `there` says of a pod whether it is.
    pub(super) fn keep(&mut self, there: impl Fn(&OfPod) -> bool) -> io::Result<()> {
        let before = self.given.len();
        self.given.retain(|g| g.of.as_ref().is_none_or(&there));
        if self.given.len() == before { Ok(()) } else { self.write() }
    }

    fn write(&self) -> io::Result<()> {
        let beside = self.file.with_extension("new");
        let mut file = fs::File::create(&beside)?;
        file.write_all(&serde_json::to_vec(&self.given)?)?;
        file.sync_all()?;
        fs::rename(&beside, &self.file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pod: &str) -> OfPod {
        OfPod { namespace: "ml".into(), pod: pod.into(), container: "main".into() }
    }

    fn places(names: &[&str]) -> Vec<String> {
        names.iter().map(|n| (*n).into()).collect()
    }

    #[test]
    fn places_belong_to_one_container_and_outlive_the_agent() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("places.json");
        let (mut all, told) = Places::open(&file).unwrap();
        assert_eq!(told, None);
        all.give(places(&["b", "a"]), "t1".into()).unwrap();
        let env: BTreeMap<String, String> = [("GPU".into(), "1".into())].into();
        assert!(!all.start(places(&["a"]), &of("x"), env.clone()).unwrap(), "not those");
        assert!(all.start(places(&["a", "b"]), &of("x"), env.clone()).unwrap());
        let (mut all, _) = Places::open(&file).unwrap();
        let found = all.of(&of("x")).unwrap();
        assert_eq!((found.token.as_str(), &found.env), ("t1", &env));
        // A pod of the same name with other places is another pod.
        all.give(places(&["c"]), "t2".into()).unwrap();
        assert!(all.start(places(&["c"]), &of("x"), BTreeMap::new()).unwrap());
        assert_eq!(all.tokens(), ["t2".to_string()].into());
        // Places that are given again were free.
        all.give(places(&["c", "d"]), "t3".into()).unwrap();
        assert_eq!((all.of(&of("x")), all.tokens()), (None, ["t3".to_string()].into()));
        assert!(all.start(places(&["c", "d"]), &of("y"), BTreeMap::new()).unwrap());
        all.keep(|_| false).unwrap();
        assert!(all.tokens().is_empty());
    }

    #[test]
    fn a_damaged_file_is_set_aside() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("places.json");
        fs::write(&file, "{").unwrap();
        let (all, told) = Places::open(&file).unwrap();
        assert!(all.tokens().is_empty() && told.unwrap().contains("is damaged"));
        assert!(folder.path().join("places.damaged").exists());
    }
}
