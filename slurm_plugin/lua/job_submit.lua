-- Slurm's job_submit.lua, for a site that has none. A site that has one adds this to it:
--
--   local penstock = dofile("/etc/slurm/penstock.lua")
--
--   function slurm_job_submit(job, partitions, uid)
--     ... the site's own rules, before the job has a job spec ...
--     return penstock.job_submit(job, partitions, uid)
--   end
--
--   function slurm_job_modify(job, record, partitions, uid)
--     local answer = penstock.job_modify(job, record, partitions, uid)
--     if answer ~= slurm.SUCCESS then return answer end
--     ...
--   end
local folder = debug.getinfo(1, "S").source:match("^@(.*/)") or "./"
local penstock = dofile(folder .. "penstock.lua")

slurm_job_submit = penstock.job_submit
slurm_job_modify = penstock.job_modify

return slurm.SUCCESS
